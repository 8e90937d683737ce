"""The parts of the fault suite that judge: they must find what is wrong, and nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any, cast

import pytest
from celery.schedules import crontab

from celery_dtimer import faults
from tests.chaos import report
from tests.chaos.edits import FAULTS
from tests.chaos.history import SkipNote
from tests.chaos.ledger import Book, Call, Gap
from tests.chaos.monitor import Sample, resident, slope
from tests.chaos.oracle import Cron, Every, Once, Rule
from tests.chaos.plan import Deck, episodes
from tests.chaos.verdict import Evidence, Stored, Verdict, Window, judge, story_of
from tests.chaos.workload import Change, Planned, Request
from tests.ledger import SentRun

BEGIN, END = 1_000_000, 1_010_000  # an episode of ten seconds
ACTIVE = Stored("active", END + 1000)
CREATED = Change("created", BEGIN, BEGIN + 5, Every(1000, BEGIN))
FIRST = BEGIN + 1000


# ------------------------------------------------------------------ the oracle


def test_an_interval_goes_on_from_its_anchor_in_both_directions() -> None:
    assert Every(300, 1000).moments(500, 1600) == [700, 1000, 1300, 1600]
    assert Every(300).moments(500, 1600) == []


@pytest.mark.parametrize(
    ("moment", "fits"),
    [(1005, False), (1299, False), (1300, True), (1310, True), (1311, False), (1905, True)],
)
def test_an_interval_starts_one_interval_after_its_creation(moment: int, fits: bool) -> None:
    assert Every(300).may_start(moment, 1000, 1010) is fits


@pytest.mark.parametrize(
    ("text", "zone", "first"),
    [
        ("* * * * * *", "UTC", "2030-01-01T00:00:01"),
        ("*/20 * * * * *", "UTC", "2030-01-01T00:00:20"),
        ("5 */10 * * * *", "UTC", "2030-01-01T00:00:05"),
        ("* * * * *", "UTC", "2030-01-01T00:01:00"),
        ("0 0 * * * *", "Asia/Kathmandu", "2030-01-01T00:15:00"),
    ],
)
def test_a_cron_text_is_read_second_by_second(text: str, zone: str, first: str) -> None:
    begin = round(datetime(2030, 1, 1, tzinfo=timezone.utc).timestamp() * 1000)
    expected = datetime.fromisoformat(first).replace(tzinfo=timezone.utc)
    assert Cron(text, zone).moments(begin, begin + 3_600_000)[0] == expected.timestamp() * 1000


def test_the_minutes_of_a_cron_text_are_celerys() -> None:
    begin = round(datetime(2030, 1, 1, tzinfo=timezone.utc).timestamp())
    minutes = crontab(minute="*/7").minute
    found = Cron("*/7 * * * *").moments(begin * 1000 - 1, begin * 1000 + 3_599_999)
    assert [moment // 60_000 % 60 for moment in found] == sorted(minutes)


# ------------------------------------------------------------------ the verdict


def sent(*moments: int, name: str = "a", late: int = 3, first: int = 1) -> list[SentRun]:
    """Return runs as the ledger has them, numbered from ``first`` on."""
    return [
        SentRun("id-a", name, moment, f"{name}-{moment}", "host:1:aa", number, moment + late)
        for number, moment in enumerate(moments, first)
    ]


def grid(count: int = 10, first: int = FIRST, step: int = 1000) -> list[int]:
    return [first + step * number for number in range(count)]


def evidence(
    runs: Sequence[SentRun] = (),
    skips: Sequence[SkipNote] = (),
    changes: Sequence[Change] = (CREATED,),
    policy: dict[str, Any] | None = None,
    stored: Stored | None = ACTIVE,
    gaps: Sequence[Gap] = (),
    **more: Any,
) -> Evidence:
    """Return what an episode with one timer has left behind."""
    rule: Rule = next(change.rule for change in changes if change.rule is not None)
    timer = Planned("a", "id-a", rule, policy or {}, changes=list(changes))
    values: dict[str, Any] = {
        "book": Book(runs=list(runs), gaps=list(gaps)),
        "planned": {"a": timer},
        "skips": {"id-a": list(skips)},
        "stored": {} if stored is None else {"a": stored},
        "is_atomic": True,
        "windows": [Window("a fault", BEGIN + 4500, BEGIN + 6000)],
        "ended_ms": END,
        "settled_ms": END - 100,
    }
    return Evidence(**{**values, **more})


def skip(reason: str, *moments: int, at: int | None = None, runs: int | None = None) -> SkipNote:
    at = moments[-1] + 5 if at is None else at
    return SkipNote(at, reason, len(moments) if runs is None else runs, moments[0], moments[-1])


def assert_held(verdict: Verdict) -> None:
    assert verdict.problems == []
    total = verdict.total
    assert total.expected == (
        total.sent + total.skipped + total.pending + total.lost + total.lost_by_redis
    )


def test_all_runs_that_were_sent_once_and_on_time_are_well() -> None:
    verdict = judge(evidence(sent(*grid())))
    assert_held(verdict)
    assert (verdict.total.sent, verdict.total.late_ms) == (10, [3] * 10)
    assert verdict.tallies["none yet"].sent == 4, "those before the fault"
    assert verdict.tallies["a fault"].sent == 6


def test_a_run_that_nobody_accounts_for_is_lost() -> None:
    moments = grid()
    verdict = judge(evidence(sent(*moments[:4], *moments[5:])))
    assert verdict.total.lost == 1
    assert f"the run for {moments[4]} was neither sent nor skipped" in verdict.problems[0]
    assert "a fault" in verdict.problems[0]


@pytest.mark.parametrize(
    ("reason", "policy", "is_right"),
    [
        ("coalesced", {}, True),
        ("coalesced", {"coalesce": False}, False),
        ("backlog", {"coalesce": False}, True),
        ("backlog", {}, False),
        ("misfire", {"misfire_grace_time": 1}, True),
        ("misfire", {}, False),
        ("paused", {}, False),
        ("superseded", {}, False),
        ("refused", {}, False),
        ("overlap", {}, False),
    ],
)
def test_a_skipped_run_has_a_reason_that_can_be(
    reason: str, policy: dict[str, Any], is_right: bool
) -> None:
    moments = grid()
    verdict = judge(
        evidence(sent(*moments[:4], *moments[6:]), [skip(reason, *moments[4:6])], policy=policy)
    )
    assert (verdict.problems == []) is is_right
    assert verdict.reasons == {reason: 2}
    assert verdict.total.skipped == 2


def test_a_wrong_number_of_skipped_runs_is_found() -> None:
    moments = grid()
    verdict = judge(
        evidence(sent(*moments[:4], *moments[6:]), [skip("coalesced", *moments[4:6], runs=3)])
    )
    assert "3 runs" in verdict.problems[0]
    assert "there were 2" in verdict.problems[0]


def test_a_run_that_is_sent_and_skipped_is_found() -> None:
    moments = grid()
    verdict = judge(evidence(sent(*moments), [skip("coalesced", moments[4])]))
    assert "was sent, and counted as skipped" in verdict.problems[0]


@pytest.mark.parametrize("is_atomic", [True, False])
def test_a_double_is_excused_by_a_fault_and_only_where_dispatch_is_confirmed(
    is_atomic: bool,
) -> None:
    moments = grid()
    again = sent(moments[5], first=6, late=400)
    window = [Window("kill", moments[5] - 100, moments[5] + 100)]
    found = judge(evidence([*sent(*moments), *again], is_atomic=is_atomic, doubling=window))
    assert found.total.doubled == 1
    assert any("came 2 times" in problem for problem in found.problems) is is_atomic
    nothing = judge(evidence([*sent(*moments), *again], is_atomic=is_atomic))
    assert any("came 2 times" in problem for problem in nothing.problems)


def test_doubles_have_one_task_id_and_no_two_runs_share_one() -> None:
    moments = grid()
    runs = sent(*moments)
    other = SentRun("id-a", "a", moments[5], "another id", "host:2:bb", 6, moments[5] + 9)
    window = [Window("kill", BEGIN, END)]
    verdict = judge(evidence([*runs, other], is_atomic=False, doubling=window))
    assert any("several task ids" in problem for problem in verdict.problems)
    shared = [*runs[:-1], SentRun("id-a", "a", moments[9], runs[0].task_id, "host:1:aa", 10, END)]
    assert any("have one task id" in problem for problem in judge(evidence(shared)).problems)


def test_what_redis_lost_after_it_had_acknowledged_it_is_counted_by_itself() -> None:
    moments = grid()
    again = sent(moments[5], first=6, late=400)
    verdict = judge(evidence([*sent(*moments), *again], replays=[Window("failover", BEGIN, END)]))
    assert_held(verdict)
    assert (verdict.total.doubled, verdict.total.replayed) == (0, 1)


def test_an_early_run_is_found() -> None:
    verdict = judge(evidence([*sent(*grid(9)), *sent(FIRST + 9000, late=-2, first=10)]))
    assert "came 2 ms early" in verdict.problems[0]


def test_a_run_that_was_never_due_is_found() -> None:
    verdict = judge(evidence(sent(*sorted([*grid(), FIRST + 500]))))
    assert f"a run for {FIRST + 500}, at which none was due" in verdict.problems[0]


def test_a_message_of_a_former_owner_shows_in_the_numbers() -> None:
    runs = sent(*grid())
    runs[6:8] = [
        SentRun("id-a", "a", runs[6].scheduled_ms, "x", "host:9:zz", 6, runs[6].seen_ms),
        runs[7],
    ]
    verdict = judge(evidence(runs))
    assert "run 6 of host:9:zz came after run 6" in verdict.problems[0]


def test_an_interval_without_an_anchor_begins_where_its_first_run_says_if_that_can_be() -> None:
    created = Change("created", BEGIN, BEGIN + 5, Every(1000))
    assert_held(judge(evidence(sent(*grid(9, first=FIRST + 4)), changes=[created])))
    verdict = judge(evidence(sent(*grid(9, first=FIRST + 40)), changes=[created]))
    assert "at which none was due" in verdict.problems[0]


def test_pending_runs_are_those_from_the_stored_due_time_on_which_must_not_be_long_past() -> None:
    moments = grid()
    fresh = judge(evidence(sent(*moments[:9]), stored=Stored("active", moments[9])))
    assert_held(fresh)
    assert fresh.total.pending == 1
    stale = judge(evidence(sent(*moments[:6]), stored=Stored("active", moments[6])))
    assert "overdue at the end" in stale.problems[0]


def test_a_timer_that_vanished_or_stands_still_is_found() -> None:
    assert any(
        "not stored" in text for text in judge(evidence(sent(*grid()), stored=None)).problems
    )
    broken = judge(evidence(sent(*grid()), stored=Stored("broken", END + 1000)))
    assert "is broken; it was left active" in broken.problems[0]


def test_a_pause_skips_what_lies_in_it_and_nothing_is_sent_meanwhile() -> None:
    moments = grid()
    changes = [
        CREATED,
        Change("paused", moments[3] + 100, moments[3] + 110),
        Change("resumed", moments[6] + 100, moments[6] + 110),
    ]
    notes = [skip("paused", *moments[4:7], at=moments[6] + 105)]
    assert_held(judge(evidence(sent(*moments[:4], *moments[7:]), notes, changes)))
    verdict = judge(evidence(sent(*moments), (), changes))
    assert any("while it was paused" in problem for problem in verdict.problems)


@pytest.mark.parametrize(("paused", "lost"), [(True, 0), (False, 1)])
def test_what_a_timer_would_have_skipped_that_ends_paused_is_told_by_nobody(
    paused: bool, lost: int
) -> None:
    moments = grid(60)
    end = moments[50]
    pause = Change("paused", moments[3] + 100, moments[3] + 110)
    changes = [CREATED, *([pause] if paused else []), Change("deleted", end, end + 5)]
    runs = sent(*moments[:4])
    found = judge(evidence(runs, (), changes, stored=None, ended_ms=end + 1000, settled_ms=end))
    assert bool(found.total.lost) is bool(lost)


def test_another_schedule_supersedes_what_was_due_and_begins_anew() -> None:
    moments, at = grid(), FIRST + 4200
    changes = [CREATED, Change("rescheduled", at, at + 5, Every(400))]
    later = grid(14, first=at + 402, step=400)
    skipped = [skip("superseded", moments[4], at=at + 3)]
    runs = [*sent(*moments[:4]), *sent(*[m for m in later if m <= END], first=5)]
    stored = Stored("active", END + 100)
    assert_held(judge(evidence(runs, skipped, changes, stored=stored)))
    assert judge(evidence(runs, (), changes, stored=stored)).total.lost == 1


def test_a_superseded_run_tells_nothing_of_the_schedule_after_it() -> None:
    """The call took long: the run before it came due meanwhile, and would fit the new interval."""
    asked, done = BEGIN + 1100, BEGIN + 3000
    changes = [
        Change("created", BEGIN + 780, BEGIN + 785, Every(1000)),
        Change("rescheduled", asked, done, Every(300)),
    ]
    moments = grid(23, first=done + 285, step=300)
    runs, skipped = sent(*moments), [skip("superseded", BEGIN + 1781, at=done)]
    assert_held(judge(evidence(runs, skipped, changes, is_atomic=False)))


@pytest.mark.parametrize(("fault_began", "lost"), [(11_900, False), (15_000, True)])
def test_what_waited_for_a_fault_to_be_mended_goes_with_its_timer(
    fault_began: int, lost: bool
) -> None:
    moments, end = grid(12), BEGIN + 24_000
    changes = [CREATED, Change("deleted", end, end + 5)]
    windows = [Window("a fault", BEGIN + fault_began, end + 1000)]
    runs = sent(*[m for m in moments if m < BEGIN + 12_000])
    found = judge(evidence(runs, (), changes, stored=None, windows=windows, ended_ms=end + 2000))
    assert bool(found.total.lost) is lost


@pytest.mark.parametrize("is_atomic", [True, False])
def test_a_run_in_doubt_goes_with_its_timer(is_atomic: bool) -> None:
    moments, at = grid(), FIRST + 4200
    changes = [
        CREATED,
        Change("rescheduled", at, at + 5, Every(4000)),
        Change("deleted", at + 3000, at + 3005),
    ]
    runs = sent(*moments[:4])
    found = judge(evidence(runs, (), changes, stored=None, is_atomic=is_atomic))
    assert found.total.lost == int(is_atomic)
    found = judge(evidence(runs[:3], (), changes, stored=None, is_atomic=is_atomic))
    assert found.total.lost == 1 + int(is_atomic), "only one can be"


def test_what_was_due_when_redis_lost_its_data_is_counted_by_itself() -> None:
    moments, lost = grid(), FIRST + 4500
    again = Change("created", lost + 60, lost + 90, Every(1000, BEGIN))
    changes = [CREATED, Change("lost", lost, lost + 50), again]
    runs = [*sent(*moments[:4]), *sent(*moments[5:])]
    verdict = judge(evidence(runs, (), changes))
    assert_held(verdict)
    assert verdict.total.lost_by_redis == 1
    early = judge(
        evidence([*sent(*moments[:2]), *sent(moments[3]), *sent(*moments[5:])], (), changes)
    )
    assert early.total.lost == 1, "it is not one of the last before the loss"


def test_messages_that_nobody_could_see_are_no_losses_of_the_product() -> None:
    moments = grid()
    runs, gap = sent(*moments[:4], *moments[5:]), Gap(moments[4] - 20, moments[4] + 80, "restart")
    numbered = [*runs[:4], *sent(*moments[5:], first=5)]
    verdict = judge(evidence(numbered, gaps=[gap]))
    assert_held(verdict)
    assert verdict.total.lost_by_redis == 1
    assert judge(evidence(numbered, gaps=[Gap(END, END, "")])).total.lost == 1


def test_a_single_run_is_sent_once_also_for_a_moment_that_had_come() -> None:
    created = Change("created", BEGIN, BEGIN + 5, Once(BEGIN - 500))
    stored = Stored("stopped", None)
    verdict = judge(evidence(sent(BEGIN - 500, late=520), changes=[created], stored=stored))
    assert_held(verdict)
    assert verdict.total.late_ms == [20], "it was not late before it was created"
    assert judge(evidence(changes=[created], stored=stored)).total.lost == 1


def test_triggers_and_calls_come_once_each_or_once_a_try() -> None:
    trigger = Request("a", FIRST, FIRST + 10, 1, FIRST)
    assert_held(judge(evidence(sent(FIRST + 4), triggers=[trigger])))
    twice = judge(evidence(sent(FIRST + 4, FIRST + 6), triggers=[trigger]))
    assert "2 runs of a trigger" in twice.problems[0]
    assert_held(
        judge(
            evidence(
                sent(FIRST + 4, FIRST + 6), triggers=[Request("a", FIRST, FIRST + 10, 2, FIRST)]
            )
        )
    )
    assert judge(evidence(triggers=[trigger])).total.lost == 1

    call = Request("c", FIRST, FIRST + 10, 1, FIRST + 500)
    for seen, problem in (
        ([FIRST + 505], ""),
        ([FIRST + 400], "early"),
        ([], "never sent"),
        ([FIRST + 505, FIRST + 900], "2 times"),
    ):
        found = evidence(sent(*grid()), calls=[call])
        found.book.calls += [Call("c", moment) for moment in seen]
        problems = judge(found).problems
        assert [problem in text for text in problems] == ([True] if problem else [])


def test_what_nobody_asked_for_is_found() -> None:
    found = evidence([*sent(*grid()), *sent(FIRST, name="b")])
    found.book.calls.append(Call("c", FIRST))
    found.book.enter_texts([b"{"], FIRST)
    problems = judge(found).problems
    assert "1 runs of 'b', which nobody has created" in problems
    assert any("a call c that nobody has made" in problem for problem in problems)
    assert any("can not be read" in problem for problem in problems)


def test_the_story_of_a_timer_has_all_that_is_known_of_it_in_order() -> None:
    moments = grid(2)
    story = story_of(evidence(sent(*moments), [skip("coalesced", FIRST + 2000)]), "a").splitlines()
    assert [line.split(" ")[0] for line in story[1:]] == sorted(
        line.split(" ")[0] for line in story[1:]
    )
    assert [
        word for line in story for word in ("created", "sent", "skipped", "the end") if word in line
    ]


# ------------------------------------------------------------------ plan and report


def test_a_seed_says_what_happens() -> None:
    kinds = ["atomic", "confirmed", "rabbitmq"]
    assert episodes(7, 600, kinds) == episodes(7, 600, kinds)
    plans = [episodes(seed, 60, kinds) for seed in range(20)]
    assert {plan[0].deployment for plan in plans} == {"atomic"}
    assert {plan[1].deployment for plan in plans} == {"confirmed", "rabbitmq"}
    assert {episode.deployment for episode in episodes(7, 3600, kinds)} == set(kinds)
    assert sum(episode.seconds for episode in episodes(7, 3600, kinds)) == pytest.approx(3600)
    first, second = (episodes(7, 60, kinds)[0].random("faults") for _ in range(2))
    assert first.random() == second.random()


def test_a_deck_draws_everything_equally_often_and_by_its_seed() -> None:
    names = ["a", "b", "c"]
    deck, other = Deck(1, names), Deck(1, names)
    drawn = [deck.draw(names) for _ in range(9)]
    assert drawn == [other.draw(names) for _ in range(9)]
    assert set(deck.drawn.values()) == {3}
    assert deck.draw(["b"]) == "b"


def test_every_fault_is_for_some_deployment_and_nothing_is_left_out() -> None:
    kinds = ("atomic", "confirmed", "rabbitmq", "sentinel")
    deployments = {
        kind: SimpleNamespace(kind=kind, is_atomic=kind in ("atomic", "sentinel")) for kind in kinds
    }
    fits = {
        name: {kind for kind, each in deployments.items() if fault.fits(cast(Any, each))}
        for name, fault in FAULTS.items()
    }
    assert {name for name, kinds in fits.items() if not kinds} <= {
        "clock an hour off, moved while it runs"
    }
    assert {kind for kind, kinds in fits.items() if kinds == {"sentinel"}} == {
        name for name in FAULTS if name.startswith("Sentinel")
    }
    for label in faults.POINTS:
        assert f"kill -9 {label.replace('_', ' ')}" in FAULTS
    assert not any("'" in name for name in FAULTS), "they stand in commands"


def test_memory_grows_by_least_squares_of_what_is_warm() -> None:
    cold = [Sample(at, 10_000_000 * at) for at in range(10)]
    warm = [Sample(at, 90_000_000 + 1000 * at) for at in range(10, 100)]
    assert slope([*cold, *warm]) == pytest.approx(3_600_000)
    assert slope([*cold, *warm[:30]]) is None, "too little to tell"
    assert resident(os.getpid()) is not None
    assert resident(2**22 + 1) is None


def test_reports_add_up_and_survive_a_file() -> None:
    one = report.Report("make chaos CHAOS_SEED=1", "2026-12-02")
    verdict = judge(evidence(sent(*grid())))
    one.rows.update(verdict.tallies)
    one.injected["a fault"] = 1
    one.expected["atomic"] = 10
    one.takeovers["kill"] = [1.5]
    one.memory, one.slopes = [(1, 2)], [0.5]
    both = report.merged([report.Report.of_line(one.line()), report.Report.of_line(one.line())])
    assert both.total.sent == 2 * one.total.sent == 20
    assert both.injected == {"a fault": 2}
    text = report.as_markdown(both)
    assert "| a fault | 2 | 12 | 12 | 0 | 3 ms | 3 ms | 3 ms | 0 | 0 | 0 | 0 |" in text
    assert "| atomic: expected / lost / doubled | 20 / 0 / 0 |" in text
    assert "1.50 / 1.50 / 1.50 s (2 times)" in text
    assert json.loads(one.line())["command"] == "make chaos CHAOS_SEED=1"
    assert "no fault yet" in report.as_text(both)
