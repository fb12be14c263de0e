"""A model's name -> local files of one commit. The only network code of the project."""

from shark_llm.hub.location import HubModel, LocalModel, ModelLocation, parse_model
from shark_llm.hub.resolve import (
    Metadata,
    Resolved,
    WeightFile,
    fetch_metadata,
    fetch_weights,
    resolve_checkpoint,
)
from shark_llm.hub.settings import HubSettings

__all__ = [
    "HubModel",
    "HubSettings",
    "LocalModel",
    "Metadata",
    "ModelLocation",
    "Resolved",
    "WeightFile",
    "fetch_metadata",
    "fetch_weights",
    "parse_model",
    "resolve_checkpoint",
]
