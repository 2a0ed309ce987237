"""The holder of an API key: a name, and what the operator allows it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

UNNAMED = "unnamed"  # the name of all tenants whose keys have none


@dataclass(frozen=True, slots=True)
class Tenant:
    """The holder of one or more keys; without keys, every client is the tenant without a name."""

    name: str = ""  # in metrics, logs and usage; several keys may have one name, and share its quotas
    id: str = ""  # separates caches, stored responses and files; the same in all processes and after a restart
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None  # requests at a time
    priority: int = 0  # added to that of each request; lower is served first
    models: tuple[str, ...] = ()  # patterns of names; empty: all models

    def may_use(self, model: str) -> bool:
        """Return whether the tenant may name a model."""
        return not self.models or any(fnmatchcase(model, pattern) for pattern in self.models)

    @property
    def unlimited(self) -> Tenant:
        """The tenant without its quotas, for work that they do not count."""
        return replace(self, requests_per_minute=None, tokens_per_minute=None, concurrent=None)

    @property
    def has_quota(self) -> bool:
        return (self.requests_per_minute, self.tokens_per_minute, self.concurrent) != (None, None, None)


NO_TENANT = Tenant()
