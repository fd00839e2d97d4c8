"""Where units of work are computed: threads of this process, or the workers of a Ray cluster."""

from isomerge.engine.engines import Engine, Threads, Unit, engine_of, require_threads

__all__ = ["Engine", "Threads", "Unit", "engine_of", "require_threads"]
