"""`make vendor`: the libraries and fonts of the page, packed again from npm by version. Needs npm. A test checks the hashes.

Each is one file of a package, taken as it is; `tail` is what makes a script a module. vendor.json says what came from where.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

VENDOR = Path(__file__).resolve().parent.parent / "src" / "headrace" / "api" / "page" / "vendor"


@dataclass(frozen=True)
class Source:
    name: str  # of the file here
    package: str
    version: str
    path: str  # inside the package
    license: str
    license_path: str
    tail: str = ""


AS_MODULE = "export default {};\n"
FONT = "files/{}-latin-{}-normal.woff2"
SOURCES = (
    Source("htm-preact.js", "htm", "3.1.1", "preact/standalone.module.js", "Apache-2.0", "LICENSE"),
    Source("uplot.js", "uplot", "1.6.32", "dist/uPlot.iife.min.js", "MIT", "LICENSE", AS_MODULE.format("uPlot")),
    Source("uplot.css", "uplot", "1.6.32", "dist/uPlot.min.css", "MIT", "LICENSE"),
    Source("d3-hierarchy.js", "d3-hierarchy", "3.1.3", "dist/d3-hierarchy.min.mjs", "ISC", "LICENSE"),
    Source("marked.js", "marked", "18.2.1", "lib/marked.esm.js", "MIT", "LICENSE"),
    Source("purify.js", "dompurify", "3.5.0", "dist/purify.min.js", "Apache-2.0", "LICENSE", AS_MODULE.format("DOMPurify")),
    Source("inter.woff2", "@fontsource-variable/inter", "5.3.0", FONT.format("inter", "wght"), "OFL-1.1", "LICENSE"),
    Source("plex-mono.woff2", "@fontsource/ibm-plex-mono", "5.3.0", FONT.format("ibm-plex-mono", 400), "OFL-1.1", "LICENSE"),
)


def packed(package: str, version: str, folder: Path) -> Path:
    found = subprocess.run(
        ["npm", "pack", "--silent", f"{package}@{version}", "--pack-destination", str(folder)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return folder / found.stdout.split()[-1]


def content(archive: Path, path: str) -> bytes:
    with tarfile.open(archive) as files:
        member = files.extractfile(f"package/{path}")
        assert member is not None, path
        return member.read()


def without_source_map(data: bytes) -> bytes:
    """The map is not here, and a browser's tools would ask for it."""
    lines = [line for line in data.splitlines(keepends=True) if not line.startswith(b"//# sourceMappingURL=")]
    return b"".join(lines)


def main() -> None:
    VENDOR.mkdir(exist_ok=True)
    listed = []
    with tempfile.TemporaryDirectory() as folder:
        for source in SOURCES:
            archive = packed(source.package, source.version, Path(folder))
            data = content(archive, source.path)
            if source.name.endswith((".js", ".css")):
                data = without_source_map(data)
            if source.tail:
                data = data.rstrip() + b"\n" + source.tail.encode()
            (VENDOR / source.name).write_bytes(data)
            license_name = f"LICENSE.{source.package.split('/')[-1]}.txt"
            (VENDOR / license_name).write_bytes(content(archive, source.license_path))
            listed.append(
                {
                    "file": source.name, "package": source.package, "version": source.version, "path": source.path,
                    "license": source.license, "license_file": license_name, "sha256": hashlib.sha256(data).hexdigest(),
                }
            )  # fmt: skip
    (VENDOR / "vendor.json").write_text(json.dumps(listed, indent=1) + "\n")


if __name__ == "__main__":
    main()
