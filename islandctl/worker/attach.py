"""``islandctl.attach``: the exchange for a training loop of one's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from islandctl.config.exchange import Exchange
from islandctl.config.given import exchange_of
from islandctl.config.pace import Pace
from islandctl.errors import ConfigError, UsageError
from islandctl.exchange import island as engine
from islandctl.exchange.journal import Journal, MemoryJournal
from islandctl.exchange.transport import Transport
from islandctl.ledger.configuration import exchange_hash
from islandctl.worker import process
from islandctl.worker.alone import Alone, Exchanger
from islandctl.worker.island import Island, check_whole
from islandctl.worker.objects import Stateful
from islandctl.worker.session import Session
from islandctl.worker.torch_optimizer import OptimizerState
from islandctl.worker.trained import Model, named_parameters


class Place(Transport, Protocol):
    """One cell's place at a relay. ``islandctl.run_cells`` and ``islandctl.InProcessRelay`` give it."""

    cell: int
    num_cells: int
    run: str
    config_hash: str
    """See ``exchange_hash``."""
    exchange: Exchange | None
    """What the relay was made for."""
    windows: tuple[int, ...]
    """Each cell's own steps a window, with ``pace: measured``."""

    def tell_model(self, attempt: int, parameters: Sequence[tuple[str, Sequence[int]]]) -> None:
        """Tell what this cell's model consists of; refused when another cell's differs."""

    def begin(self, versions: tuple[int, ...], steps: int) -> bool:
        """Tell with which versions of the fragments this cell begins, for how many steps of the run; refused when
        another's do not fit.

        True: its state is of an earlier relay's ledger.
        """


def attach(
    model: Model,
    optimizer: Any,
    *,
    state: Mapping[str, Stateful] | None = None,
    held_out_hash: str = "",
    exchange: Exchange | Mapping[str, Any] | None = None,
    steps: int | None = None,
    tokens_per_step: int | None = None,
    transport: Place | None = None,
    seed: int = 0,
    journal: Journal | None = None,
) -> Island:
    """Attach a training loop to the run that it is a cell of.

    In a process that ``islandctl launch`` has started, everything comes from there, and checkpoints, restarts, stops
    and the figures that ``islandctl status`` shows are taken care of::

        island = islandctl.attach(model, optimizer, state={"data": data})

    With ``transport`` the caller says it all, for cells inside one process (see ``islandctl.run_cells``)::

        island = islandctl.attach(model, optimizer, transport=place, steps=200, tokens_per_step=512)

    Args:
        model: a module, or its parameters by name: fp32, plain or sharded by FSDP2. The same first values in every
            cell.
        optimizer: torch's, or several of them: all that step the model, since their state goes into the checkpoints.
            None: the loop steps the parameters itself, and gives what it must remember for that as ``state``.
        state: (launched) more objects with ``state_dict`` and ``load_state_dict`` for the checkpoints: the place in
            the data, a scheduler. They are loaded before ``attach`` returns.
        held_out_hash: (launched) a hash of the text that is evaluated on; cells with unequal ones are refused.
        exchange: how the cells exchange: ``Exchange``, or its keys as in a recipe; left out: what the relay was made
            for.
        steps: inner steps of the run; a cell with steps of its own takes another number (``island.num_steps``).
        tokens_per_step: what ``island.step()`` counts when it is not told.
        transport: this cell's place at the relay.
        seed: of the rounding of packets.
        journal: where it is kept at which step a round was applied; needed only to repeat steps after a crash.

    Raises:
        UsageError: neither launched nor given a transport, or both kinds of arguments.
        ConfigError: the settings do not fit the model, the optimizer is not of this model, or not of all of it that
            is trained, or the relay is for another run.
        RelayError: code ``model``: another cell holds another model; the message names a parameter.
    """
    if transport is None:
        explicit = {"exchange": exchange, "steps": steps, "tokens_per_step": tokens_per_step, "journal": journal}
        given = [name for name, value in explicit.items() if value is not None]
        if given:
            raise UsageError(
                f"attach: {given[0]} is given, but no transport",
                hint="transport=place inside islandctl.run_cells; in a launched run the recipe says all this",
            )
        return Session(process.here(), model, optimizer, state or {}, held_out_hash)
    if state or held_out_hash:
        raise UsageError("attach: state and held_out_hash are for launched runs", hint="leave out transport")
    if steps is None:
        raise UsageError("attach: steps is missing: how many inner steps has the run?")
    for name, number, least in (("steps", steps, 1), ("tokens_per_step", tokens_per_step, 0), ("seed", seed, 0)):
        if number is not None:
            check_whole(f"attach: {name}", number, least)
    return _explicit(
        model, optimizer, transport, _settings(exchange, transport), steps, tokens_per_step, seed, journal
    )


def _settings(exchange: Exchange | Mapping[str, Any] | None, transport: Place) -> Exchange:
    if exchange is None:
        if getattr(transport, "exchange", None) is None:
            raise UsageError("attach: exchange is missing: how do the cells exchange?")
        return cast(Exchange, transport.exchange)
    return exchange_of(exchange)


def _explicit(
    model: Model,
    optimizer: Any,
    place: Place,
    settings: Exchange,
    steps: int,
    tokens_per_step: int | None,
    seed: int,
    journal: Journal | None,
) -> Island:
    if not all(hasattr(place, name) for name in ("cell", "num_cells", "config_hash", "tell_model", "begin")):
        raise UsageError(
            f"attach: a {type(place).__name__} is no cell's place at a relay",
            hint="take the one that islandctl.run_cells gives, or InProcessRelay.transport(cell)",
        )
    windows = getattr(place, "windows", ())
    if exchange_hash(settings, place.num_cells, windows) != place.config_hash:
        raise ConfigError(
            f"attach: the relay of run '{place.run}' was made for another exchange than cell {place.cell}'s",
            hint="give all cells and their relay one and the same Exchange, or leave exchange out",
        )
    if windows and (steps - settings.warmup) % settings.window:
        raise ConfigError(
            f"attach: {steps} steps are no whole windows of {settings.window}: with pace: measured cells meet only "
            "where a window ends"
        )
    if settings.warmup >= steps:
        raise ConfigError(f"attach: exchange.warmup: {settings.warmup} steps must be fewer than the run's {steps}")
    own = windows[place.cell] if windows else None
    parameters = named_parameters(model)
    OptimizerState(optimizer, parameters)  # refuses one that is not of this model
    exchanger: Exchanger

    def begin() -> None:
        if place.begin(exchanger.versions(), steps) and isinstance(exchanger, engine.Island):
            exchanger.change_ledger()

    if settings.mode == "none":
        exchanger = Alone(settings.fragments)
    else:
        exchanger = engine.Island(
            parameters,
            settings=settings,
            steps=steps,
            own=own,
            seed=seed,
            run=place.run,
            config_hash=place.config_hash,
            attempt=1,
            cell=place.cell,
            num_cells=place.num_cells,
            transport=place,
            journal=journal or MemoryJournal(),
            on_wait=getattr(place, "check_others", lambda: None),
        )
        place.tell_model(1, [(name, tuple(parameter.shape)) for name, parameter in parameters.items()])
    aside = getattr(place, "aside", None)  # where cells of one process take turns
    pace = Pace.of(settings, own)
    return Island(
        exchanger,
        num_steps=steps,
        pace=pace,
        tokens_per_step=tokens_per_step,
        aside=aside,
        at_begin=begin,
    )
