"""Gives the numbers of a committed step by name, for whatever draws or stores them."""

from __future__ import annotations

from elastic.protocol.commit_record import Outcome


def metrics(outcome: Outcome) -> dict[str, float]:
    """Returns the loss, the norm, the tokens and, if the commit tells them, the norms of the layers: {"loss": .., "norm/layers.3": ..}."""
    layers = {f"norm/{name}": norm for name, norm in outcome.layer_norms.items()}
    return {"loss": outcome.loss, "norm": outcome.norm, "tokens": float(outcome.tokens), **layers}
