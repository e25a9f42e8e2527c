"""What this relay accepts and serves, by explicit configuration alone (A-069).

`rules` holds the built-in policies, `policy` puts the configured ones in order and into effect, `following`
keeps up with what operators ban, `plugins` runs an operator's own. The relay does not judge truth and ranks
nothing (R-324): a policy sees one packet and says no, or nothing.
"""

from __future__ import annotations

from relayd.policy.following import BanFollower
from relayd.policy.plugins import Plugins, PolicyRequest, Refusal
from relayd.policy.policy import Policy, apply_policy

__all__ = ["BanFollower", "Plugins", "Policy", "PolicyRequest", "Refusal", "apply_policy"]
