"""Request and score files: round trips, and invalid files are refused with the reason."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from coupled_adam.evaluation.downstream import requests_file
from coupled_adam.evaluation.downstream.requests_file import (
    RequestFile,
    Score,
    ScoreFile,
    TokenRequest,
    read_requests,
    read_scores,
    write_requests,
    write_scores,
)

ASKED = RequestFile(
    {
        "arc_easy": [TokenRequest((5, 6), (7,)), TokenRequest((5, 6), (8, 9)), TokenRequest((5,), (6, 7))],
        "arc_challenge": [TokenRequest((5, 6), (8, 9)), TokenRequest((50256,), (0,))],
    },
    {"tokenizer": "gpt2", "limit": None, "versions": {"arc_easy": 1.0}},
)
ANSWERS = {
    "arc_easy": [Score(-1.25, False), Score(-1e-9, True), Score(-345.678901234, False)],
    "arc_challenge": [Score(-2.0, True), Score(-3.0, False)],
}
MODEL = {"run": "größe", "step": 300, "precision": "bf16", "seconds": {"arc_easy": 1.5}}

tokens = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5).map(tuple)
requests = st.lists(st.builds(TokenRequest, tokens, tokens), unique=True, max_size=6)
tasks = st.dictionaries(st.text(max_size=8), requests, max_size=4)
finite = st.floats(allow_nan=False, allow_infinity=False)


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    path = tmp_path / "requests.safetensors"
    write_requests(path, ASKED)
    return path


@pytest.fixture
def answered(tmp_path: Path) -> Path:
    path = tmp_path / "scores.safetensors"
    write_scores(path, ScoreFile.of(ASKED, ANSWERS, MODEL))
    return path


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(tasks=tasks, kept=st.dictionaries(st.text(), st.none() | st.integers() | st.text() | finite))
def test_requests_are_read_back_unchanged(
    tmp_path: Path, tasks: dict[str, list[TokenRequest]], kept: dict[str, Any]
) -> None:
    file = RequestFile(tasks, kept)
    write_requests(tmp_path / "requests", file)
    read = read_requests(tmp_path / "requests")
    assert read == file
    assert list(read.tasks) == list(tasks)
    assert read.digest == file.digest


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(tasks=tasks, data=st.data())
def test_scores_are_read_back_unchanged_and_found_by_tokens(
    tmp_path: Path, tasks: dict[str, list[TokenRequest]], data: st.DataObject
) -> None:
    scores = {
        name: data.draw(st.lists(st.builds(Score, finite, st.booleans()), min_size=len(asked), max_size=len(asked)))
        for name, asked in tasks.items()
    }
    file = ScoreFile.of(RequestFile(tasks, {"limit": 3}), scores, MODEL)
    write_scores(tmp_path / "scores", file)
    read = read_scores(tmp_path / "scores")
    assert read == file
    for name, asked in tasks.items():
        assert [read.find(name, request) for request in asked] == scores[name]
        assert list(read.scores[name].values()) == scores[name]


def test_scores_are_found_in_any_order_of_rebuilt_requests(answered: Path) -> None:
    read = read_scores(answered)
    for task, requests in ASKED.tasks.items():
        for request, score in reversed(list(zip(requests, ANSWERS[task], strict=True))):
            assert read.find(task, request) == score
    assert read.find("arc_easy", TokenRequest((50256,), (0,))) is None  # of another task
    assert read.find("arc_easy", TokenRequest((5, 6, 7), (7,))) is None
    assert read.find("piqa", TokenRequest((5, 6), (7,))) is None
    assert (read.settings, read.requests_digest, read.model) == (ASKED.settings, ASKED.digest, MODEL)


def test_scores_of_some_tasks_can_be_stored_before_the_others(tmp_path: Path) -> None:
    part = ScoreFile.of(ASKED, {"arc_challenge": ANSWERS["arc_challenge"]}, MODEL)
    write_scores(tmp_path / "scores", part)
    assert list(read_scores(tmp_path / "scores").scores) == ["arc_challenge"]
    assert part.requests_digest == ASKED.digest


def test_a_missing_score_is_detected() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ScoreFile.of(ASKED, {"arc_easy": ANSWERS["arc_easy"][:2]}, MODEL)


def test_requests_of_several_tasks_are_stored_once(asked: Path) -> None:
    arrays = load_file(asked)
    assert len(arrays["context_lengths"]) == 4
    assert len(arrays["members"]) == 5
    assert (arrays["tokens"].dtype, arrays["offsets"].dtype) == (np.int32, np.int64)


@pytest.mark.parametrize(
    "other",
    [
        {"arc_easy": ASKED.tasks["arc_easy"]},
        {"arc_hard": ASKED.tasks["arc_easy"], "arc_challenge": ASKED.tasks["arc_challenge"]},
        {"arc_easy": ASKED.tasks["arc_easy"][::-1], "arc_challenge": ASKED.tasks["arc_challenge"]},
        {"arc_easy": [TokenRequest((5, 6, 7), (7,))], "arc_challenge": ASKED.tasks["arc_challenge"]},
    ],
)
def test_the_digest_covers_names_and_tokens(other: dict[str, list[TokenRequest]]) -> None:
    assert RequestFile(dict(ASKED.tasks), {"other": "settings"}).digest == ASKED.digest
    assert RequestFile(other, ASKED.settings).digest != ASKED.digest


def test_the_start_of_the_continuation_is_part_of_the_key() -> None:
    sequence = (1, 2, 3, 4)
    keys = {TokenRequest(sequence[:k], sequence[k:]).key for k in (1, 2, 3)}
    assert len(keys) == 3
    assert {len(key) for key in keys} == {16}


@pytest.mark.parametrize(("context", "continuation"), [((), (1,)), ((1,), ()), ((1,), (-1,)), ((-5, 2), (1,))])
def test_requests_without_tokens_or_with_negative_ones_are_refused(
    context: tuple[int, ...], continuation: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=re.escape(str(continuation if context == (1,) else context))):
        TokenRequest(context, continuation)


def test_a_file_is_replaced_atomically(asked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_the_disk(arrays: dict[str, np.ndarray], path: Path, metadata: dict[str, str]) -> None:
        path.write_bytes(b"half of it")
        raise SafetensorError("No space left on device")

    before = asked.read_bytes()
    monkeypatch.setattr(requests_file, "save_file", fill_the_disk)
    with pytest.raises(OSError, match=f"{asked}: .*No space left on device"):
        write_requests(asked, RequestFile({}, {}))
    assert asked.read_bytes() == before
    assert list(asked.parent.iterdir()) == [asked]


def test_a_missing_file_is_named_with_the_command_that_writes_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.st: .*`coupled-adam eval requests MODEL FILE`"):
        read_requests(tmp_path / "none.st")
    with pytest.raises(ValueError, match=r"none\.st: .*`coupled-adam eval answer RUN\b"):
        read_scores(tmp_path / "none.st")


def test_files_of_another_kind_are_refused(asked: Path, answered: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{answered}: .*'coupled-adam scores 1'.*'coupled-adam requests 1'"):
        read_requests(answered)
    with pytest.raises(ValueError, match=f"{asked}: .*'coupled-adam requests 1'.*'coupled-adam scores 1'"):
        read_scores(asked)
    weights = tmp_path / "model.safetensors"
    save_file({"weight": np.zeros(3)}, weights)
    with pytest.raises(ValueError, match=f"{weights}: .*'coupled-adam requests 1'"):
        read_requests(weights)
    text = tmp_path / "text.json"
    text.write_text("{}")
    with pytest.raises(ValueError, match=f"{text}: .*`coupled-adam eval answer RUN"):
        read_scores(text)


@pytest.mark.parametrize("read", [read_requests, read_scores])
def test_truncated_files_are_refused(read: Callable[[Path], Any], asked: Path, answered: Path) -> None:
    path = asked if read is read_requests else answered
    whole = path.read_bytes()
    for length in {0, 1, 7, 8, 100, len(whole) // 2, len(whole) - 1}:
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=rf"^{path}: .*\(.+\).*`coupled-adam eval "):
            read(path)


@pytest.mark.parametrize("read", [read_requests, read_scores])
def test_one_changed_bit_is_detected(read: Callable[[Path], Any], asked: Path, answered: Path) -> None:
    path = asked if read is read_requests else answered
    whole = bytearray(path.read_bytes())
    for place in (len(whole) - 1, len(whole) - 17, len(whole) - 40, bytes(whole).index(b"arc_easy") + 2):
        changed = whole.copy()
        changed[place] ^= 1
        path.write_bytes(changed)
        with pytest.raises(ValueError, match="damaged"):
            read(path)


def written_by_hand(path: Path, form: str, record: dict[str, Any], **changed: np.ndarray | None) -> Path:
    """The file with other arrays or another record, and a valid checksum."""
    arrays = {name: array for name, array in (load_file(path) | changed).items() if array is not None}
    text = json.dumps(record)
    checksum = sha256(text.encode())
    for name, array in sorted(arrays.items()):
        checksum.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    save_file(arrays, path, metadata={"format": form, "record": text, "sha256": checksum.hexdigest()})
    return path


REQUEST_RECORD = {"tasks": [["arc_easy", 3], ["arc_challenge", 2]], "settings": {}}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"offsets": np.array([0, 3, 7, 10, 13])}, r"offsets .*\b12 tokens\b.*\b4 requests"),
        ({"offsets": np.array([1, 3, 7, 10, 12])}, r"offsets .*\b12 tokens\b.*\b4 requests"),
        ({"offsets": np.array([0, 3, 12])}, r"offsets .*\b12 tokens\b.*\b4 requests"),
        ({"offsets": np.array([0, 7, 3, 10, 12])}, "context .*continuation"),
        ({"context_lengths": np.array([0, 2, 1, 1])}, "context .*continuation"),
        ({"context_lengths": np.array([3, 2, 1, 1])}, "context .*continuation"),
        ({"tokens": np.array([-1] + [1] * 11, dtype=np.int32)}, "token -1"),
        ({"members": np.array([0, 1, 2, 3, 4])}, r"\bits 4\b"),
        ({"members": np.array([0, 1, 2, 3, -1])}, r"\bits 4\b"),
        ({"members": np.array([0, 1, 2])}, r"tasks .*\b5\b.*arrays .*\b3\b"),
        ({"tokens": np.ones(12, dtype=np.int64)}, r"\btokens\b.*\bint32\b"),
        ({"tokens": None}, r"\btokens\b.*\bint32\b"),
        ({"offsets": np.array(0)}, r"\boffsets\b.*\bint64\b"),
    ],
)
def test_inconsistent_requests_are_refused(asked: Path, changed: dict[str, Any], message: str) -> None:
    assert read_requests(written_by_hand(asked, requests_file.REQUESTS, REQUEST_RECORD)).tasks == ASKED.tasks
    with pytest.raises(ValueError, match=f"damaged, .*{message}"):
        read_requests(written_by_hand(asked, requests_file.REQUESTS, REQUEST_RECORD, **changed))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"tasks": [["arc_easy", 3], ["arc_challenge", -2]]}, r"\['arc_challenge', -2\]"),
        ({"tasks": [["arc_easy", "3"]]}, r"\['arc_easy', '3'\]"),
        ({"tasks": [["arc_easy", 3]]}, r"tasks .*\b3\b.*arrays .*\b5\b"),
        ({"tasks": "arc_easy"}, r"\btasks\b"),
        ({"settings": None}, r"\bsettings\b"),
    ],
)
def test_inconsistent_records_are_refused(asked: Path, record: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"damaged, .*{message}"):
        read_requests(written_by_hand(asked, requests_file.REQUESTS, REQUEST_RECORD | record))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"log_likelihoods": np.array([-1.0, -1.0, np.nan, -1.0, -1.0])}, "finite"),
        ({"log_likelihoods": np.zeros(4)}, r"\b5 requests\b.*\b4 scores\b"),
        ({"keys": np.zeros((5, 8), dtype=np.uint8)}, r"\bkeys\b.*\buint8\b"),
        ({"is_greedy": np.zeros(5)}, r"\bis_greedy\b.*\bbool\b"),
    ],
)
def test_inconsistent_scores_are_refused(answered: Path, changed: dict[str, Any], message: str) -> None:
    record = REQUEST_RECORD | {"requests_digest": "", "model": {}}
    with pytest.raises(ValueError, match=f"damaged, .*{message}"):
        read_scores(written_by_hand(answered, requests_file.SCORES, record, **changed))


def test_answering_loads_no_package_of_an_extra() -> None:
    code = (
        "import sys, json, coupled_adam.evaluation.downstream.scoring\n"
        "print(json.dumps(sorted(name.partition('.')[0] for name in sys.modules)))"
    )
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)
    extras = {"lm_eval", "transformers", "datasets", "tokenizers", "tiktoken", "scipy", "sklearn", "matplotlib"}
    assert not extras & set(loaded)
