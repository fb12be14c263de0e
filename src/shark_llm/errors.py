"""The exception tree: one class per kind of fault a user can cause or meet.

    SharkError                       anything shark-llm reports to a user on one line
    ├── UsageError                   the command line or a setting is wrong            (exit code 2)
    │   └── UnsupportedTargetError   no such compile target
    ├── CheckpointError              the checkpoint cannot be read as it stands
    │   ├── UnsupportedModelError    config.json describes something we do not implement
    │   └── WeightMapError           tensors missing, unknown, or of a wrong shape
    ├── HubError                     the hub, the network or the local snapshot
    ├── ShardingError                the model cannot be split that way
    ├── CapacityError                does not fit: disk, device memory, or a compiled limit
    ├── CompileError                 the compiler failed
    ├── VerificationError            a golden check failed: the compiled module is wrong
    ├── ArtifactError                a bundle or archive is missing, damaged, stale or foreign
    │   └── VersionMismatchError     built with another compiler, schema or package
    ├── DeviceError                  a device is missing, unfit or named twice
    └── RequestError                 a request to the server is invalid                 (HTTP 4xx)

Every message is one line and names three things: the value found, the limit or expectation, and the
remedy. Faults of our own are `assert`s and escape this tree on purpose.
"""

from __future__ import annotations


class SharkError(Exception):
    """Base of every fault reported to a user on one line.

    `exit_code` is what the command line tools exit with.
    """

    exit_code: int = 1

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class UsageError(SharkError):
    """The command line or a setting is wrong."""

    exit_code = 2


class UnsupportedTargetError(UsageError):
    """The compile target is not in the table."""


class CheckpointError(SharkError):
    """The checkpoint cannot be read as it stands."""


class UnsupportedModelError(CheckpointError):
    """config.json describes something this package does not implement."""


class WeightMapError(CheckpointError):
    """Tensors are missing, unknown, or of a wrong shape."""


class HubError(SharkError):
    """The hub, the network or the local snapshot."""


class ShardingError(SharkError):
    """The model cannot be split that way."""


class CapacityError(SharkError):
    """Something does not fit: disk, device memory, or a compiled limit."""


class CompileError(SharkError):
    """The compiler failed."""


class VerificationError(SharkError):
    """A golden check failed: the compiled module computes something else than the model."""


class ArtifactError(SharkError):
    """A bundle or an archive is missing, damaged, stale or foreign."""


class VersionMismatchError(ArtifactError):
    """The artifact was built with another compiler, schema or package than runs here."""


class DeviceError(SharkError):
    """A device is missing, unfit, or named twice."""


class RequestError(SharkError):
    """A request to the server is invalid.

    `param` names the offending field, `code` is the machine-readable OpenAI-style code, `status`
    the HTTP status (4xx, or 503 when the server cannot take the request now).
    """

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status
