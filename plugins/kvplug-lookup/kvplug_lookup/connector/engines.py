"""Sources for the engines in a directory, as they join and leave."""

from __future__ import annotations

from kvplug.engine import ConnectorContext, Engine, JoinedEngines
from kvplug_lookup.connector.sources import Source, followed


class EngineSources(JoinedEngines[Source]):
    """A source for each engine in the directory that this engine can load from.

    The directory's thread makes and ends the sources; the scheduler takes the changes in its next call.
    """

    def __init__(self, context: ConnectorContext) -> None:
        num_workers = context.parallelism.num_workers
        super().__init__(context, self._source_of, lambda each: len(each.contacts) == num_workers)
        self._context = context
        self._used: dict[str, Source] = {}
        """The sources that the scheduler uses, by name."""
        self._planned: dict[str, Source] = {}
        """Those that the workers know from plans."""

    def _source_of(self, engine: Engine) -> Source:
        source = followed(self._context, f"peer {engine.engine_id}", engine.contacts)
        source.engine = engine
        return source

    def update(self, sources: list[Source]) -> None:
        """Update the list for engines that joined or left since the last call."""
        followed = {source.name: source for source in self.all()}
        gone = {name for name, used in self._used.items() if followed.get(name) is not used}
        sources[:] = [source for source in sources if source.name not in gone]
        sources += [source for name, source in followed.items() if self._used.get(name) is not source]
        self._used = followed

    def take_changes(self) -> tuple[tuple[str, ...], tuple[tuple[str, tuple[str, ...]], ...]]:
        """Return changes for the workers: sources that left, and then sources that joined, with contacts."""
        used, planned = self._used, self._planned
        left = tuple(name for name, source in planned.items() if used.get(name) is not source)
        joined = tuple(
            (name, tuple(contact for _, contact in sorted(source.engine.contacts.items())))
            for name, source in used.items()
            if source.engine is not None and planned.get(name) is not source
        )
        self._planned = used
        return left, joined
