# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: INP001, S310, T201 - a script of its own; its addresses come from the chart
"""`helm test`: the operator's account may list pools, and the operator says that it is ready.

Arguments: the folder of the account's token, then paths at the API server and addresses that must answer. Creates
nothing. Standard library only; a failure ends it with the answer in the log.
"""

import os
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path

TIMEOUT_S = 10


def request(target: str, folder: Path) -> urllib.request.Request:
    """A path goes to the API server with the account's token; an address is asked as it is."""
    if not target.startswith("/"):
        return urllib.request.Request(target)
    server = f"https://{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}"
    token = (folder / "token").read_text()
    return urllib.request.Request(server + target, headers={"Authorization": f"Bearer {token}"})


def main(folder: Path, targets: list[str]) -> int:
    """Ask each of *targets*; 0 if all answer with success."""
    tls = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    failed = 0
    for target in targets:
        try:
            with urllib.request.urlopen(request(target, folder), timeout=TIMEOUT_S, context=tls) as answer:
                print(f"ok    {target}: {answer.status}")
        except urllib.error.HTTPError as e:
            failed += 1
            print(f"FAIL  {target}: {e.code} {e.read().decode(errors='replace')[:500]}")
        except OSError as e:
            failed += 1
            print(f"FAIL  {target}: {e}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
