"""Continues the `DataLoader` of a fit within an epoch."""

from __future__ import annotations

from lightning.pytorch import Trainer

from outlast.elastic.loader_position import LoaderPosition, has_no_state


def position_of(trainer: Trainer) -> LoaderPosition:
    """The position in the loader that the program, or its data module, has yet to return.

    Other loaders are left alone: several, and those that are made anew for an epoch.
    """
    loop = trainer.fit_loop
    position = LoaderPosition(lambda: trainer.current_epoch, trainer.world_size)
    load_states = loop._load_combined_loader_states

    def take_over() -> None:
        combined = loop._combined_loader
        found = [] if combined is None else combined.flattened
        anew = trainer.reload_dataloaders_every_n_epochs
        if combined is not None and len(found) == 1 and not anew and has_no_state(found[0]):
            combined.flattened = [position.of(found[0])]
        load_states()

    # Lightning calls this when it has the loader, before it iterates it.
    loop._load_combined_loader_states = take_over
    return position
