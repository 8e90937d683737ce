// BullMQ as a peer. `create` makes the job schedulers and prints the seconds that this took; `work`
// runs a worker, without which BullMQ schedules nothing. Its jobs do nothing but count: lines
// "time count" go to FOLDER/counts; with BENCH_KEEP, "arrival due" lines to FOLDER/arrivals at the end.
import { appendFileSync, writeFileSync } from 'node:fs';
import { Queue, Worker } from 'bullmq';
import IORedis from 'ioredis';

const [, , mode, folder] = process.argv;
const address = new URL(process.env.BENCH_REDIS_URL);
const connection = new IORedis({
  host: address.hostname, port: Number(address.port), maxRetriesPerRequest: null,
});
const workload = JSON.parse(process.env.BENCH_WORKLOAD);
const IN_FLIGHT = Number(process.env.BENCH_IN_FLIGHT || 1);
const CONCURRENCY = 100;
const LOOK_MS = 20;

function repeat(index) {
  if (index >= workload.count || !workload.every) return { pattern: '0 0 1 1 *' };
  const every = 1000 * workload.every;
  if (workload.start === null) return { every };
  return { every, startDate: Math.round(1000 * workload.start + (every * index) / workload.count) };
}

async function create() {
  const queue = new Queue('bench', { connection });
  await queue.waitUntilReady();
  const started = performance.now();
  let next = 0;
  const some = async () => {
    while (next < workload.count + workload.far) {
      const index = next++;
      await queue.upsertJobScheduler(`timer-${index}`, repeat(index), {
        name: 'noop',
        data: { args: [index, 'daily-summary'], kwargs: { tenant: 'acme', notify: true } },
        opts: { removeOnComplete: true, removeOnFail: true },
      });
    }
  };
  await Promise.all(Array.from({ length: IN_FLIGHT }, some));
  console.log((performance.now() - started) / 1000);
  await queue.close();
  process.exit(0);
}

function work() {
  const arrivals = [];
  let count = 0, written = -1;
  const worker = new Worker('bench', async (job) => {
    count++;
    if (process.env.BENCH_KEEP) {
      arrivals.push(`${Date.now() / 1000} ${(job.timestamp + (job.opts.delay || 0)) / 1000}`);
    }
  }, { connection, concurrency: CONCURRENCY });
  worker.on('error', (error) => console.error(error));
  setInterval(() => {
    if (count === written) return;
    written = count;
    appendFileSync(`${folder}/counts`, `${Date.now() / 1000} ${count}\n`);
  }, LOOK_MS);
  process.on('SIGTERM', () => {
    writeFileSync(`${folder}/arrivals`, arrivals.join('\n'));
    process.exit(0);
  });
}

if (mode === 'create') await create();
else work();
