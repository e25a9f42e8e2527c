"""What this relay accepts and serves, by explicit configuration alone (A-069).

`rules` holds the built-in policies. `policy` orders the configured ones and puts them into effect,
`following` keeps up with operators' bans, and `plugins` runs an operator's own policies. The relay does not
judge truth and ranks nothing (R-324): a policy sees one packet and either refuses it or says nothing.
"""

from __future__ import annotations

from relayd.policy.following import BanFollower
from relayd.policy.plugins import Plugins, PolicyRequest, Refusal
from relayd.policy.policy import Policy, apply_policy

__all__ = ["BanFollower", "Plugins", "Policy", "PolicyRequest", "Refusal", "apply_policy"]
