"""What a server raises for callers that know what to do about it. They see its name alone."""


class AskAgain(Exception):
    """The call can't be answered yet, and is to be made again."""


class OutOfStep(Exception):
    """To the first server: this one has not the state that the entries of the log follow on."""
