"""Every error DualPace raises on purpose, and who is meant to read it.

DualPaceError
  ConfigError        a flag or option is wrong; the server does not start
  ModelError         a checkpoint is missing, damaged or of an unsupported kind
  HardwareError      this machine cannot do what was asked of it
  RequestError       one request is wrong: the client gets a 4xx, nobody else notices
    CapacityError    no KV tier could ever hold the request
  EngineError        an engine failed: the client gets a 5xx
        AssistError       the GPU engine did not do its part of an iteration: it may be tried again
        StepTooLargeError the device lacks the memory for this step: a smaller one may do
        FatalEngineError its device is unusable: the process must end and be started again
"""


class DualPaceError(Exception):
    """Base of all errors that DualPace raises on purpose."""


class ConfigError(DualPaceError, ValueError):
    """An option has a value that cannot work; the message names the option."""


class ModelError(DualPaceError):
    """A checkpoint is missing, damaged, or of an architecture that is not supported."""


class HardwareError(DualPaceError):
    """The machine lacks something that was asked for (a GPU, an instruction set, memory)."""


class RequestError(DualPaceError, ValueError):
    """A client's request is wrong. `param` names the offending field, if one is to blame."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class CapacityError(RequestError):
    """The request is larger than any KV tier could ever hold."""


class EngineError(DualPaceError):
    """An engine failed while it held the request."""


class AssistError(EngineError):
    """The other engine did not do its part of an iteration; nothing of the iteration counts."""


class StepTooLargeError(EngineError):
    """The device had no memory for a step; nothing of the step counts."""


class FatalEngineError(EngineError):
    """The engine's device cannot be used any more by this process."""
