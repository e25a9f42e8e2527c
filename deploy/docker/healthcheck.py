#!/opt/relayd/bin/python
"""Exit 0 if the relay in this container is ready, else 1 with the reason."""

import os
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path

from relayd.addresses import host_from_here
from relayd.config import ConfigurationError, load


def main() -> None:
    config = os.environ.get("RELAYD_CONFIG")
    try:
        settings = load(Path(config) if config else None, os.environ)
    except ConfigurationError as error:
        sys.exit(str(error))
    # The relay's own certificate names its public address, not this one, and nobody is in between. Nor must a
    # proxy be, which the engine may have put into the environment.
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}),
        urllib.request.HTTPSHandler(context=ssl._create_unverified_context()),
    )
    scheme = "https" if settings.tls_cert else "http"
    try:
        opener.open(f"{scheme}://{host_from_here(settings.host)}:{settings.port}/readyz", timeout=4).close()
    except urllib.error.HTTPError as error:
        sys.exit(f"{error.code} {error.read(200).decode(errors='replace')}")
    except OSError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
