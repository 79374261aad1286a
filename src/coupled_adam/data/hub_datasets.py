"""Stream datasets from the Hugging Face hub: only the tokens are stored, and no code from the dataset runs.

The commit of the dataset is recorded, so that a resumed preparation reads the same documents.
"""

import logging
from collections.abc import Iterator
from typing import Any

from coupled_adam.base.errors import UserConnectionError, UserError
from coupled_adam.base.extras import require
from coupled_adam.base.text import counted
from coupled_adam.data.sources import Piece, Position

DATASETS = {"openwebtext": "hf:Skylion007/openwebtext", "slimpajama": "hf:cerebras/SlimPajama-627B"}
# Branch in which the hub stores script-based datasets converted to files.
CONVERTED = "refs/convert/parquet"
PATIENCE_SECONDS = 10.0


class HubDataset:
    """One split of a dataset.

    Args:
        spec: "openwebtext", "slimpajama" or "hf:NAME[:CONFIG[:SPLIT[:COLUMN]]]"; the default split is "train".
        field: the text column if `spec` names none.
        found: result of `found` from the start of a resumed preparation; None for the newest commit.
    """

    def __init__(self, spec: str, field: str, found: dict[str, Any] | None) -> None:
        parts = DATASETS.get(spec, spec).removeprefix("hf:").split(":")
        name, config, split, column = [*parts, "", "", ""][:4]
        if len(parts) > 4 or not name:
            raise UserError(f"source {spec!r}: expected hf:NAME[:CONFIG[:SPLIT[:COLUMN]]], such as hf:allenai/c4:en")
        self.spec = spec
        self.column = column or field
        self._datasets = require("datasets", "hf", f"to read {spec}")
        self._datasets.disable_progress_bars()  # the preparation has its own
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        wanted = found or {"revision": None}
        self._found = {"revision": commit_of(spec, name, wanted["revision"])}
        self._dataset = self._open(name, config or None, split or "train")
        known = (self._dataset.info.splits or {}).get(split or "train")
        self._total: int | None = known.num_examples if known is not None else None
        self._given = 0

    def found(self) -> dict[str, Any]:
        return self._found

    def default_fraction(self) -> float:
        return 0.005

    def pieces(self, position: Position | None) -> Iterator[Piece]:
        self._given = skipped = 0
        if position is not None and position["datasets"] == self._datasets.__version__:
            self._dataset.load_state_dict(position["state"])
            self._given = position["documents"]
        elif position is not None:  # another version may not understand the state; skipping documents is slower
            skipped = position["documents"]
        documents = iter(self._dataset)
        while True:
            try:
                document = next(documents)
            except StopIteration:
                return
            except Exception as error:  # network, file system and decoder errors have many classes
                raise UserConnectionError(
                    f"{self.spec}: reading stopped after {counted(self._given, 'document')} ({_reason(error)}); "
                    "finished work is kept, run the same command again to resume"
                ) from error
            self._given += 1
            if self._given <= skipped:
                continue
            if self.column not in document:
                raise UserError(
                    f"{self.spec}: no column {self.column!r} (it has: {', '.join(document)}); name the text "
                    "column with --field"
                )
            if document[self.column]:
                yield Piece(str(document[self.column]))

    def position(self) -> Position:
        return {
            "documents": self._given,
            "datasets": self._datasets.__version__,
            "state": self._dataset.state_dict(),
        }

    def progress(self) -> float | None:
        return min(self._given / self._total, 1.0) if self._total else None

    def _open(self, name: str, config: str | None, split: str) -> Any:
        options = {"name": config, "split": split, "streaming": True}
        try:
            try:
                return self._datasets.load_dataset(name, revision=self._found["revision"], **options)
            except RuntimeError as error:
                if "scripts are no longer supported" not in str(error):
                    raise
                self._found = {"revision": commit_of(self.spec, name, CONVERTED)}
                return self._datasets.load_dataset(name, revision=self._found["revision"], **options)
        except Exception as error:  # library, network and format errors have many classes
            raise UserError(f"source {self.spec!r}: cannot be opened ({_reason(error)})") from error


def commit_of(spec: str, name: str, revision: str | None) -> str:
    """Resolve a branch to a commit, in one request; `datasets` would retry for minutes."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        commit = HfApi().dataset_info(name, revision=revision, timeout=PATIENCE_SECONDS).sha
    except GatedRepoError:
        raise UserError(
            f"source {spec!r}: access is gated; accept the terms on the dataset's page, then run `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise UserError(f"source {spec!r}: the Hugging Face hub has no dataset {name!r} that you can read") from None
    except HfHubHTTPError as error:
        raise UserError(f"source {spec!r}: the Hugging Face hub refused the request ({_reason(error)})") from error
    except Exception as error:  # the HTTP library, and so the class, depends on the version of huggingface_hub
        raise UserConnectionError(
            f"source {spec!r}: the Hugging Face hub cannot be reached ({_reason(error)}); go online, or use "
            "local files with text:FILES"
        ) from error
    return commit or revision or "main"


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
