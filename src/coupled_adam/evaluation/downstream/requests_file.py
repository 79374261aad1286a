"""File formats for an evaluation on two machines: requests as tokens, and their scores.

The machine that scores needs only the model, no tokenizer and no tasks. Each file is a safetensors file with arrays and
a JSON record, and a checksum over both. A score is found by the tokens of its request, never by its position in the
file, so that requests from another tokenizer or another version of a task never match.

Letters: U distinct requests of a file, L their total tokens, M requests of all tasks (tasks may share requests).

    requests    tokens (L,) int32, offsets (U + 1,) int64, context_lengths (U,) int64, members (M,) int64: indices into
                the U requests, task by task
    scores      keys (M, 16) uint8, log_likelihoods (M,) float64, is_greedy (M,) bool
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from coupled_adam.base.errors import UserError, UserOSError
from coupled_adam.base.files import parse_json, replacing
from coupled_adam.base.text import counted

REQUESTS = "coupled-adam requests 1"
SCORES = "coupled-adam scores 1"
# Remedies for unusable files.
REMEDY = {
    REQUESTS: "write it with `coupled-adam eval requests MODEL FILE`",
    SCORES: "write it with `coupled-adam eval answer RUN REQUESTS FILE`",
}
KEY_BYTES = 16


@dataclass(frozen=True)
class TokenRequest:
    """A request to a model: the likelihood of the continuation, given the context.

    Example:
        >>> TokenRequest(context=(50256,), continuation=(464, 886)).key.hex()
        '96af8463aaf209e54192e981f18ecd6a'
    """

    context: tuple[int, ...]
    """At least one token; the end-of-text token if a task has no context."""
    continuation: tuple[int, ...]
    """At least one token."""

    def __post_init__(self) -> None:
        for name, tokens in (("context", self.context), ("continuation", self.continuation)):
            if not tokens or min(tokens) < 0:
                raise UserError(f"Invalid {name} of a request: {tokens}; expected at least one token, none negative")

    @property
    def key(self) -> bytes:
        """16-byte hash of the tokens and of the start of the continuation."""
        tokens = np.array([len(self.context), *self.context, *self.continuation], dtype="<i4")
        return hashlib.blake2b(tokens.tobytes(), digest_size=KEY_BYTES).digest()

    def require_room(self, context: int) -> None:
        """Raise if the continuation is longer than a model's context."""
        if len(self.continuation) > context:
            raise UserError(
                f"a request has a continuation of {len(self.continuation)} tokens, but the model's context is "
                f"{context}; skip this task, or evaluate a model with a longer context"
            )


@dataclass(frozen=True)
class RequestFile:
    """The requests of some tasks."""

    tasks: dict[str, list[TokenRequest]]
    """Task name -> its distinct requests, in the task's order."""
    settings: dict[str, Any]
    """How they were made, as JSON: tokenizer, limit, versions; copied to the scores."""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the tasks' names and tokens."""
        whole = hashlib.sha256()
        for name, requests in self.tasks.items():
            whole.update(json.dumps([name, len(requests)]).encode())
            whole.update(b"".join(request.key for request in requests))
        return whole.hexdigest()


@dataclass(frozen=True)
class Score:
    """A model's answer to a request."""

    log_likelihood: float
    """Of the continuation, summed over its tokens, in nats."""
    is_greedy: bool
    """Whether every token of it is the most likely one."""


@dataclass(frozen=True)
class ScoreFile:
    """The scores of the requests of some tasks, by one model."""

    scores: dict[str, dict[bytes, Score]]
    """Task name -> key of a request -> its score, in the order of the requests."""
    settings: dict[str, Any]
    """Settings of the request file."""
    requests_digest: str
    """Digest of the whole request file, even if only some of its tasks are scored."""
    model: dict[str, Any]
    """The scored model, as JSON: run, step, precision, device, seconds of each task."""

    @classmethod
    def of(cls, requests: RequestFile, scores: Mapping[str, Sequence[Score]], model: dict[str, Any]) -> "ScoreFile":
        """Make a file of scores for some or all tasks of a request file.

        Args:
            requests: the request file.
            scores: task name -> the scores of its requests, in order.
            model: the scored model.

        Example:
            >>> asked = RequestFile({"arc_easy": [TokenRequest((5,), (6, 7))]}, settings={})
            >>> scores = ScoreFile.of(asked, {"arc_easy": [Score(-2.5, False)]}, model={"step": 100})
            >>> scores.find("arc_easy", TokenRequest((5,), (6, 7)))
            Score(log_likelihood=-2.5, is_greedy=False)
            >>> scores.find("arc_easy", TokenRequest((5, 6), (7,))) is None
            True
        """
        by_key = {
            task: {request.key: score for request, score in zip(requests.tasks[task], answers, strict=True)}
            for task, answers in scores.items()
        }
        return cls(by_key, requests.settings, requests.digest, model)

    def find(self, task: str, request: TokenRequest) -> Score | None:
        """The score of a request of a task; None if it was not scored."""
        return self.scores.get(task, {}).get(request.key)


def write_requests(path: Path, file: RequestFile) -> None:
    """Write requests to `path` atomically; requests shared by several tasks are stored once."""
    numbers: dict[TokenRequest, int] = {}
    members = [numbers.setdefault(request, len(numbers)) for name in file.tasks for request in file.tasks[name]]
    lengths = [len(request.context) + len(request.continuation) for request in numbers]
    arrays = {
        "tokens": _flat((*request.context, *request.continuation) for request in numbers),
        "offsets": np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype("<i8"),
        "context_lengths": np.array([len(request.context) for request in numbers], dtype="<i8"),
        "members": np.array(members, dtype="<i8"),
    }
    tasks = [[name, len(requests)] for name, requests in file.tasks.items()]
    _write(path, REQUESTS, {"tasks": tasks, "settings": file.settings}, arrays)


def read_requests(path: Path) -> RequestFile:
    """Read a file of `write_requests`; raise ValueError for any other file."""
    record, arrays = _read(path, REQUESTS, {"tasks": list, "settings": dict})
    tokens = _array(path, arrays, "tokens", np.int32)
    offsets, context_lengths, members = (
        _array(path, arrays, name, np.int64) for name in ("offsets", "context_lengths", "members")
    )
    U = len(context_lengths)
    if len(offsets) != U + 1 or offsets[0] != 0 or offsets[-1] != len(tokens):
        raise _damaged(path, f"its offsets do not split {counted(len(tokens), 'token')} into {counted(U, 'request')}")
    continuation_lengths = np.diff(offsets) - context_lengths
    if (context_lengths < 1).any() or (continuation_lengths < 1).any():  # so offsets never decrease
        raise _damaged(path, "a request has no context or no continuation")
    if (tokens < 0).any():
        raise _damaged(path, f"token {tokens.min()} is negative")
    if ((members < 0) | (members >= U)).any():
        raise _damaged(path, f"a task refers to a request that is not among its {U}")
    requests = []
    for start, end, length in zip(offsets[:-1].tolist(), offsets[1:].tolist(), context_lengths.tolist(), strict=True):
        sequence = tuple(tokens[start:end].tolist())
        requests.append(TokenRequest(sequence[:length], sequence[length:]))
    tasks = {
        name: [requests[number] for number in members[part].tolist()]
        for name, part in _parts(path, record["tasks"], len(members))
    }
    return RequestFile(tasks, record["settings"])


def write_scores(path: Path, file: ScoreFile) -> None:
    """Write scores to `path` atomically."""
    keys = b"".join(key for scores in file.scores.values() for key in scores)
    scores = [score for by_key in file.scores.values() for score in by_key.values()]
    arrays = {
        "keys": np.frombuffer(keys, dtype=np.uint8).reshape(-1, KEY_BYTES),
        "log_likelihoods": np.array([score.log_likelihood for score in scores], dtype="<f8"),
        "is_greedy": np.array([score.is_greedy for score in scores], dtype=bool),
    }
    record = {
        "tasks": [[name, len(by_key)] for name, by_key in file.scores.items()],
        "settings": file.settings,
        "requests_digest": file.requests_digest,
        "model": file.model,
    }
    _write(path, SCORES, record, arrays)


def read_scores(path: Path) -> ScoreFile:
    """Read a file of `write_scores`; raise ValueError for any other file."""
    record, arrays = _read(path, SCORES, {"tasks": list, "settings": dict, "requests_digest": str, "model": dict})
    keys = _array(path, arrays, "keys", np.uint8, shape=(KEY_BYTES,))
    log_likelihoods = _array(path, arrays, "log_likelihoods", np.float64)
    is_greedy = _array(path, arrays, "is_greedy", np.bool_)
    if not len(keys) == len(log_likelihoods) == len(is_greedy):
        raise _damaged(path, f"{counted(len(keys), 'request')}, {counted(len(log_likelihoods), 'score')}")
    if not np.isfinite(log_likelihoods).all():
        raise _damaged(path, "a score is not a finite number")
    scores = list(map(Score, log_likelihoods.tolist(), is_greedy.tolist()))
    by_key = {
        name: dict(zip((row.tobytes() for row in keys[part]), scores[part], strict=True))
        for name, part in _parts(path, record["tasks"], len(keys))
    }
    return ScoreFile(by_key, record["settings"], record["requests_digest"], record["model"])


def _flat(sequences: Iterator[tuple[int, ...]]) -> np.ndarray:
    return np.fromiter((token for sequence in sequences for token in sequence), dtype="<i4")


def _write(path: Path, form: str, record: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    text = json.dumps(record)
    metadata = {"format": form, "record": text, "sha256": _checksum(text, arrays)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        try:
            save_file(arrays, temporary, metadata=metadata)
        except SafetensorError as error:  # for example a full disk
            raise UserOSError(f"{path}: cannot be written ({error}); free disk space or use another folder") from error


def _read(path: Path, form: str, fields: dict[str, type]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read the record and the arrays of a file.

    Args:
        path: the file.
        form: expected format, REQUESTS or SCORES.
        fields: of the record, each with its type.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file; {REMEDY[form]}")
    try:
        with safe_open(path, "np") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
    except SafetensorError as error:
        raise UserError(
            f"{path}: truncated or another kind of file ({error}); copy it again, or {REMEDY[form]}"
        ) from None
    found = metadata.get("format", "of another program")
    if found != form:
        raise UserError(f"{path}: the file format is {found!r}, expected {form!r}; {REMEDY[form]}")
    text = metadata.get("record", "")
    if metadata.get("sha256") != _checksum(text, arrays):
        raise _damaged(path, "its checksum does not match")
    try:
        record = parse_json(text, "its record")
    except ValueError as error:
        raise _damaged(path, str(error)) from None
    for name, kind in fields.items():
        if not isinstance(record, dict) or not isinstance(record.get(name), kind):
            raise _damaged(path, f"its record has no {name}")
    return record, arrays


def _checksum(text: str, arrays: dict[str, np.ndarray]) -> str:
    whole = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        array = arrays[name]
        whole.update(f"{name} {array.dtype} {array.shape}".encode())
        whole.update(array.tobytes())
    return whole.hexdigest()


def _array(
    path: Path, arrays: dict[str, np.ndarray], name: str, dtype: type[np.generic], shape: tuple[int, ...] = ()
) -> np.ndarray:
    """Return an array of the file; `shape` is the shape of one entry."""
    array = arrays.get(name)
    if array is None or array.dtype != dtype or array.ndim == 0 or array.shape[1:] != shape:
        raise _damaged(path, f"it has no array {name} of {np.dtype(dtype)}")
    return array


def _parts(path: Path, tasks: list[Any], total: int) -> Iterator[tuple[str, slice]]:
    """Name of each task, and its slice of the `total` requests."""
    first = 0
    for entry in tasks:
        match entry:
            case [str(name), int(count)] if count >= 0:
                yield name, slice(first, first + count)
            case _:
                raise _damaged(path, f"{entry!r} is not a task with a number of requests")
        first += count
    if first != total:
        raise _damaged(path, f"its tasks have {counted(first, 'request')}, its arrays {total:,}")


def _damaged(path: Path, what: str) -> UserError:
    return UserError(f"{path}: damaged, {what}; copy it again or rewrite it")
