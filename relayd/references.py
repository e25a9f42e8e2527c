"""Checks of what settings refer to (certificates, other files, plug-ins), for `relayd check-config`."""

from __future__ import annotations

from relayd.config import ConfigurationError, Settings
from relayd.federation.peers_file import read_peers
from relayd.identity.bootstrap import read_bootstrap, trust_of
from relayd.policy.plugins import load_plugins
from relayd.tls import TlsError, read_tls_files, tls_files

__all__ = ["check_references"]


def check_references(settings: Settings) -> None:
    """Raise `ConfigurationError`, listing everything that is missing or cannot be used."""
    problems: list[str] = []
    try:
        files = tls_files(settings)
        if files is not None and (files.ca is None or files.cert.exists()):  # else it is made at startup
            read_tls_files(files.cert, files.key)
    except TlsError as error:
        problems.append(str(error))
    for check in (_identities, _plugins, _peers):
        try:
            check(settings)
        except ConfigurationError as error:
            problems += error.problems
    if problems:
        raise ConfigurationError(problems)


def _identities(settings: Settings) -> None:
    trust_of(settings, read_bootstrap(settings.bootstrap_file))


def _peers(settings: Settings) -> None:
    read_peers(settings.peers_file)


def _plugins(settings: Settings) -> None:
    load_plugins(settings.policy_plugins)
