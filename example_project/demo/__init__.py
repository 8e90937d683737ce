"""``make demo``: real beats and workers share the shop's timers, and one beat is killed."""
