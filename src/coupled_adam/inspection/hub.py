"""Fetch single files of models on the Hugging Face hub."""

import re
from pathlib import Path

from coupled_adam.base.errors import UserError
from coupled_adam.base.extras import install_command

# "org/name", or a single name without a dot, such as gpt2 or bert-base-uncased.
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*|[A-Za-z0-9][\w-]*")


def fetch_from_hub(name: str, file: str) -> Path | None:
    """Path of a file of the hub model `name` in the local cache, downloaded if needed; None if it has no such file."""
    try:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
    except ImportError:
        raise UserError(
            f"{name}: no such file or folder; if it is a model on the Hugging Face hub: {install_command('hf')}"
        ) from None
    if not _hub_answers(name, file):
        # The path of an earlier download, a marker that the model has no such file, or None if unknown.
        cached = try_to_load_from_cache(name, file)
        if cached is None and _is_downloaded(name):
            raise UserError(
                f"{name}: {file} is not among the downloaded files of this model, and the Hugging Face hub cannot be "
                "reached; connect to the internet, or download the model elsewhere and pass its folder"
            )
        if cached is None:
            raise UserError(
                f"{name}: neither a file, a folder nor a downloaded model, and the Hugging Face hub cannot be reached; "
                "pass the path of a model file or folder, or connect to the internet if it is a model on the hub"
            )
        return Path(cached) if isinstance(cached, str) else None
    try:
        return Path(hf_hub_download(name, file))
    except EntryNotFoundError:
        return None
    except HfHubHTTPError as error:
        reason = str(error).strip().split("\n", maxsplit=1)[0]
        raise UserError(
            f"{name}: no such file or folder, and no accessible model on the Hugging Face hub ({reason})"
        ) from None


def _is_downloaded(name: str) -> bool:
    """Whether the local cache has any file of the model."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return any(Path(HF_HUB_CACHE, f"models--{name.replace('/', '--')}").glob("snapshots/*/*"))


def _hub_answers(name: str, file: str) -> bool:
    """Try once; `hf_hub_download` would retry for half a minute, with a warning each time."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(name, file))
    except (EntryNotFoundError, HfHubHTTPError):
        return True  # the hub answered
    except Exception:  # from the HTTP library, which depends on the version of huggingface_hub
        return False
    return True
