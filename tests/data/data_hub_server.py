"""A small Hugging Face hub: serves datasets from a folder like the real one, including byte ranges."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "([^/]+/[^/]+)"


class Hub(BaseHTTPRequestHandler):
    """Answers the requests of `huggingface_hub` for datasets."""

    protocol_version = "HTTP/1.1"
    folder: Path
    downloaded: list[str]
    """Files whose content was requested, in order."""
    branches: dict[str, str]
    """Folders of special branches such as refs/convert/parquet."""

    def do_GET(self) -> None:
        url = urlparse(self.path)
        path = unquote(url.path)
        if match := re.fullmatch(rf"/api/datasets/{NAME}(?:/revision/(.+))?", path):
            self._answer_json(self._info(match[1], match[2]))
        elif match := re.fullmatch(rf"/api/datasets/{NAME}/tree/([^/]+)/?(.*)", path):
            recursive = parse_qs(url.query).get("recursive", [""])[0].lower() in ("true", "1")
            self._answer_json(self._tree(match[1], match[2], match[3], recursive))
        elif match := re.fullmatch(rf"/datasets/{NAME}/resolve/([^/]+)/(.*)", path):
            self._answer_file(self._folder(match[1], match[2]) / match[3])
        else:
            self._answer_json(None)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        match = re.fullmatch(rf"/api/datasets/{NAME}/paths-info/([^/]+)", unquote(urlparse(self.path).path))
        if match is None:
            self._answer_json(None)
            return
        folder = self._folder(match[1], match[2])
        paths = json.loads(content)["paths"]
        self._answer_json([self._entry(folder, folder / path) for path in paths if (folder / path).exists()])

    def _folder(self, name: str, revision: str) -> Path:
        commits = {hashlib.sha1(branch.encode()).hexdigest(): place for branch, place in self.branches.items()}
        return self.folder / commits.get(revision, "main") / name

    def _info(self, name: str, revision: str | None) -> dict[str, Any] | None:
        commit = hashlib.sha1(revision.encode()).hexdigest() if revision in self.branches else COMMIT
        commit = revision if revision is not None and re.fullmatch("[0-9a-f]{40}", revision) else commit
        folder = self._folder(name, commit)
        if not folder.is_dir():
            return None
        files = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
        return {
            "id": name,
            "sha": commit,
            "private": False,
            "gated": False,
            "disabled": False,
            "tags": [],
            "downloads": 0,
            "likes": 0,
            "siblings": [{"rfilename": file} for file in files],
        }

    def _tree(self, name: str, revision: str, below: str, recursive: bool) -> list[dict[str, Any]] | None:
        folder = self._folder(name, revision)
        if not (folder / below).is_dir():
            return None
        inside = (folder / below).rglob("*") if recursive else (folder / below).iterdir()
        return [self._entry(folder, path) for path in sorted(inside)]

    @staticmethod
    def _entry(folder: Path, path: Path) -> dict[str, Any]:
        name = str(path.relative_to(folder))
        if path.is_dir():
            return {"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
        return {
            "type": "file",
            "oid": hashlib.sha1(name.encode()).hexdigest(),
            "size": path.stat().st_size,
            "path": name,
        }

    def _answer_json(self, answer: object) -> None:
        content = json.dumps({"error": "not found"} if answer is None else answer).encode()
        self.send_response(404 if answer is None else 200)
        if answer is None:
            is_api = self.path.startswith("/api/datasets/") and "/tree/" not in self.path
            self.send_header("X-Error-Code", "RepoNotFound" if is_api else "EntryNotFound")
        self._send(content, "application/json")

    def _answer_file(self, path: Path) -> None:
        if not path.is_file():
            self._answer_json(None)
            return
        content = path.read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if self.command == "GET":
            self.downloaded.append(path.name)
        if wanted and self.command == "GET":
            first, last = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
            part = content[first : last + 1]
        else:
            self.send_response(200)
            part = content
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Accept-Ranges", "bytes")
        self._send(part, "application/octet-stream")

    def _send(self, content: bytes, kind: str) -> None:
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def serving(folder: Path, branches: dict[str, str] | None = None) -> Iterator[tuple[str, list[str]]]:
    """The address of a hub with the datasets in folder/main, and the names of the files it has sent."""
    handler = type("ThisHub", (Hub,), {"folder": folder, "downloaded": [], "branches": branches or {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", handler.downloaded
    server.shutdown()
    server.server_close()
