"""What a person can cause, and the exit statuses that tell a scheduler what happened."""

EXIT_DONE = 0
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_STOPPED = 85
"""Stopped by a signal; a checkpoint was written; the same command goes on from it."""
EXIT_INTERRUPTED = 130
"""Ended at once by a second interrupt, as shells say it."""


class UserError(Exception):
    """Something the person who started the run can mend: shown as one message, without a traceback."""

    exit_status = EXIT_ERROR


class UsageError(UserError):
    """A wrong flag, key, value or combination, found before anything is loaded."""

    exit_status = EXIT_USAGE


class StepError(UserError):
    """An optimizer step that could not be made.

    Attributes:
        weights_intact: whether weights and optimizer are, on every rank, as they were before the step.
    """

    weights_intact = False
