"""Models of the Hugging Face Hub: which files of a repository are wanted, what they weigh, how they come into the local cache.

The cache is that of huggingface-hub, which other programs share. Its downloads begin anew when a process has ended in the
middle; large files are fetched here first, beside their place in the cache, and go on where they were.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from headrace.errors import CapacityError, CheckpointError, HeadraceError
from headrace.model.formats.gguf import without_part

# Nothing else is downloaded: no pickles, no code. Some repositories hold the weights twice, under these other names.
FILES = ["*.json", "*.safetensors", "*.jinja"]
IGNORED = ["original/*", "consolidated*", "*/*"]
LARGE = 16 * 2**20  # bytes from which a file is worth going on with
SPARE = 256 * 2**20  # bytes of the disk that a download leaves free
_TAG = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|F16|F32))$", re.IGNORECASE)


class Pull(NamedTuple):
    """What a model consists of. `files`: as huggingface-hub's dry run tells of them."""

    name: str  # with the tag, where it is one .gguf file
    files: list[Any]
    cache: Path

    @property
    def repo(self) -> str:
        return split_name(self.name)[0]

    @property
    def size(self) -> int:
        return sum(file.file_size or 0 for file in self.files)

    @property
    def missing(self) -> int:
        """Bytes to download: without what an earlier run has left of a file."""
        files = {file.filename: file.file_size or 0 for file in self.files if file.will_download}
        left = [path.stat().st_size for name in files for path in self.partial("*", name)]
        return max(0, sum(files.values()) - sum(left))

    @property
    def words(self) -> str:
        """What is told before it is fetched."""
        missing = f"{in_bytes(self.missing)} to download" if self.missing else "all of it is there"
        files = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        return f"{in_bytes(self.size)} in {files}, {missing}, {in_bytes(free_bytes(self.cache))} free in {self.cache}"

    @property
    def blobs(self) -> Path:
        return self.cache / ("models--" + self.repo.replace("/", "--")) / "blobs"

    def partial(self, etag: str, file: str) -> list[Path]:
        """What there is of a file; `etag`: of this content, or * for any."""
        return [Path(path) for path in glob.glob(f"{glob.escape(str(self.blobs))}/{etag}.{glob.escape(_flat(file))}.headrace")]


def _flat(file: str) -> str:
    """Of a file in a folder a name for what is in none."""
    return file.replace("/", "_")


def split_name(name: str) -> tuple[str, str | None]:
    """org/repo:Q4_K_M names one .gguf file of a repository."""
    repo, _, tag = name.partition(":")
    return repo, tag or None


def tag_of(file: str) -> str:
    """What names a .gguf file among others of its repository: Q4_K_M, or all of its name."""
    stem, _ = without_part(Path(file).name)
    found = _TAG.search(stem)
    return found[1] if found else stem


def tagged(folder: Path, tag: str) -> list[Path]:
    """The .gguf file there, or in a folder of its own, that a tag names, in all of its parts, or nothing."""
    known = by_tag(str(path.relative_to(folder)) for path in sorted(folder.rglob("*.gguf")))
    found = next((parts for each, parts in known.items() if each.lower() == tag.lower()), [])
    return [folder / name for name in found] if found and len(found) == without_part(Path(found[0]).name)[1] else []


def by_tag(files: Iterable[str]) -> dict[str, list[str]]:
    """The parts of each .gguf file of a repository, by its tag; where there are two, of the one in fewer folders."""
    wholes: dict[str, list[str]] = {}
    for name in sorted(files):
        if name.endswith(".gguf") and "mmproj" not in name:
            wholes.setdefault(str(Path(name).with_name(without_part(Path(name).name)[0])), []).append(name)
    return {tag_of(wholes[whole][0]): wholes[whole] for whole in sorted(wholes, key=lambda whole: -whole.count("/"))}


def find(name: str, revision: str | None) -> Pull:
    """Asks the Hub what `name` is. Raises CheckpointError for a repository that is not there, or does not say which file."""
    from huggingface_hub import constants, snapshot_download

    repo, tag = split_name(name)
    patterns: dict[str, Any] = {"allow_patterns": [*FILES, "*.gguf"], "ignore_patterns": IGNORED[:-1]}
    with told(repo):
        found: list[Any] = snapshot_download(repo, revision=revision, dry_run=True, tqdm_class=_silent(), **patterns)
    named = {f.filename: f for f in found}
    ggufs = {tag: [named[part] for part in parts] for tag, parts in by_tag(named).items()}
    rest = [f for f in found if not f.filename.endswith(".gguf") and "/" not in f.filename]
    if tag is None and (not ggufs or any(f.filename.endswith(".safetensors") for f in rest)):
        files = rest
    elif tag is None and len(ggufs) == 1:
        (files,) = ggufs.values()
    else:
        files = next((parts for known, parts in ggufs.items() if tag is not None and known.lower() == tag.lower()), [])
        if not files:
            sizes = {known: in_bytes(sum(f.file_size or 0 for f in parts)) for known, parts in sorted(ggufs.items())}
            names = ", ".join(f"{repo}:{known} ({size})" for known, size in sizes.items())
            raise CheckpointError(f"{name}: name one of its .gguf files: {names or 'there is none'}")
    if not any(f.filename.endswith((".gguf", ".safetensors")) for f in files):
        raise CheckpointError(f"{name}: there are no weights in safetensors or GGUF in this repository")
    known = [tag for tag, parts in ggufs.items() if parts is files]
    return Pull(f"{repo}:{known[0]}" if known else repo, files, Path(constants.HF_HUB_CACHE))


def is_cached(name: str) -> bool:
    """Whether anything of it is there."""
    from huggingface_hub import constants

    repo, tag = split_name(name)
    snapshots = Path(constants.HF_HUB_CACHE) / ("models--" + repo.replace("/", "--")) / "snapshots"
    return any(tag is None or tagged(Path(folder), tag) for folder in glob.glob(f"{glob.escape(str(snapshots))}/*"))


def free_bytes(path: Path) -> int:
    """Of the disk that `path` is or will be on."""
    while not os.path.exists(path) and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def check_room(pull: Pull) -> None:
    """Raises CapacityError if the disk cannot hold what is missing."""
    need, free = pull.missing, free_bytes(pull.cache)
    if free < need + SPARE:
        raise CapacityError(
            f"{pull.repo}: {in_bytes(need)} to download, {in_bytes(free)} free in {pull.cache}; {in_bytes(SPARE)} stay free"
        )


def download(pull: Pull, revision: str | None) -> Path:
    """Into the cache, with a progress bar on a terminal; the snapshot's directory. Raises CheckpointError."""
    from huggingface_hub import snapshot_download

    check_room(pull)
    with told(pull.repo):
        for file in pull.files:
            if file.will_download and (file.file_size or 0) >= LARGE:
                _fetch_large(pull, file)
        names = [file.filename for file in pull.files]
        return Path(snapshot_download(pull.repo, revision=revision, allow_patterns=names, tqdm_class=_silent()))


def _fetch_large(pull: Pull, file: Any) -> None:
    """One file's blob. What an earlier run has left of it is gone on with, and the whole is then held against its SHA-256."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    url, headers = hf_hub_url(pull.repo, file.filename, revision=file.commit_hash), build_hf_headers()
    about = get_hf_file_metadata(url, headers=headers)
    if urlsplit(about.location).netloc != urlsplit(url).netloc:
        headers.pop("authorization", None)  # the place that it is redirected to has a signature of its own
    etag = about.etag or ""
    blob = pull.blobs / etag
    if not re.fullmatch(r"[0-9a-f]{40,64}", etag) or blob.exists():
        return  # huggingface-hub knows what to do
    blob.parent.mkdir(parents=True, exist_ok=True)
    for other in set(pull.partial("*", file.filename)) - set(pull.partial(etag, file.filename)):
        other.unlink()  # of what the file was once
    partial = blob.with_name(f"{etag}.{_flat(file.filename)}.headrace")
    with open(partial, "r+b" if partial.exists() else "w+b") as out:
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise HeadraceError(f"{pull.repo}: another process is downloading {file.filename}") from None
        have = out.seek(0, os.SEEK_END)
        if have < (about.size or 0):
            name = file.filename
            http_get(about.location, out, headers=headers, resume_size=have, expected_size=about.size, displayed_filename=name)
        out.flush()
        os.fsync(out.fileno())
        if have and len(etag) == 64 and _sha256(partial) != etag:
            partial.unlink()
            raise HeadraceError(f"{pull.repo}: what was there of {file.filename} is damaged and was removed; pull it again")
        os.replace(partial, blob)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _silent() -> type:
    """huggingface-hub's bars say how many files it looks at: nothing for those who wait for bytes."""
    from tqdm import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **options | {"disable": True})

    return Silent


@contextlib.contextmanager
def told(repo: str, offline: bool = False) -> Iterator[None]:
    """The Hub's client raises many kinds of errors; all mean that there is no checkpoint."""
    from huggingface_hub.errors import DryRunError, HFValidationError, LocalEntryNotFoundError

    try:
        yield
    except HeadraceError:
        raise
    except HFValidationError as error:
        raise CheckpointError(f"{repo!r} is no Hub id") from error
    except Exception as error:
        if offline and isinstance(error, LocalEntryNotFoundError):
            words = f"the Hub model {repo!r} is not in the local cache, and offline nothing is downloaded"
            raise CheckpointError(words) from error
        # these two are for all that can be the matter
        hidden = error.__cause__ if isinstance(error, DryRunError | LocalEntryNotFoundError) else None
        cause = hidden or error
        said = " ".join(str(cause).split())[:500]
        if type(cause).__name__ == "ConnectError":
            said += " (is there a network? without one: what `headrace list` shows, a local path, the embedded model)"
        raise CheckpointError(f"the Hub model {repo!r} cannot be had: {type(cause).__name__}: {said}") from error


def in_bytes(count: float) -> str:
    """1.2 GB."""
    units = ["bytes", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:.0f} {units[0]}" if units[0] == "bytes" else f"{count:.1f} {units[0]}"
