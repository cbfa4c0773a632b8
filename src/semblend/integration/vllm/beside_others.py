"""The former name of `multi_connector`: command lines that name it keep working."""

from __future__ import annotations

from semblend.integration.vllm.multi_connector import MultiConnector

__all__ = ["MultiConnector"]
