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
    # The relay's own certificate names its public address, not this one, and there is nobody in between.
    context = ssl._create_unverified_context() if settings.tls_cert else None
    url = f"http{'s' if context else ''}://{host_from_here(settings.host)}:{settings.port}/readyz"
    try:
        urllib.request.urlopen(url, timeout=4, context=context).close()
    except urllib.error.HTTPError as error:
        sys.exit(f"{error.code} {error.read(200).decode(errors='replace')}")
    except OSError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
