"""A job while it runs: what its ranks do now, as a screen (`outlast top`) and as metrics for
Prometheus and OpenTelemetry.

    follower -> live_run -> screen
                         -> collect -> prometheus, otlp

Everything is read from the event logs of the run, by another process than the job's: nothing here
can slow a rank down or end it. The figures are those of the report (`outlast.events.report`), taken
again and again while the run goes on.
"""
