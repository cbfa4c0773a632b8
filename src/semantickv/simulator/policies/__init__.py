"""Policies by name. A policy is a priority function and, for some, an admission rule."""

from semantickv.simulator.policies.registry import POLICIES, Policy, find_policy

__all__ = ["POLICIES", "Policy", "find_policy"]
