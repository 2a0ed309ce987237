"""Quotas, usage and metrics of the holders of keys, for the routes and the jobs of an application."""

from __future__ import annotations

from typing import Final

from triptych.service.core.request_context import RequestContext
from triptych.service.core.state_folder import StateFolder
from triptych.service.observability.metrics import Metrics
from triptych.service.tenants.quotas import Leases, Quotas
from triptych.service.tenants.usage import Usage

_MOST_LABELLED: Final = 200  # names with metrics of their own
_OTHERS: Final = "others"


class TenantMetrics:
    """Counters by name of key; a service without keys has none."""

    def __init__(self, metrics: Metrics) -> None:
        by_model = ("tenant", "model")
        self._requests = metrics.counter(
            "tenant_requests_total", "Requests by name of key: the outcome, or rejected.", *by_model, "outcome"
        )
        self._tokens = metrics.counter(
            "tenant_tokens_total",
            "Tokens by name of key: prompt, cached (of the prompt), completion.",
            *by_model,
            "kind",
        )
        self._audio = metrics.counter("tenant_audio_seconds_total", "Seconds of audio by name of key.", *by_model)
        self._images = metrics.counter("tenant_images_total", "Images by name of key.", *by_model)
        self._seconds = metrics.counter(
            "tenant_engine_seconds_total", "Seconds of prefill and decode by name of key.", *by_model
        )
        self._names: set[str] = set()

    def ended(self, context: RequestContext, outcome: str, engine_seconds: float) -> None:
        """Count an accepted request that ended."""
        if not context.tenant.name:
            return
        labels = (self._label(context.tenant.name), context.model)
        self._requests.labels(*labels, outcome).inc()
        for kind, tokens in (
            ("prompt", context.tokens_in),
            ("cached", context.cached_tokens),
            ("completion", context.tokens_out),
        ):
            self._tokens.labels(*labels, kind).inc(tokens)
        self._seconds.labels(*labels).inc(engine_seconds)
        if context.audio_seconds:
            self._audio.labels(*labels).inc(context.audio_seconds)
        if context.images:
            self._images.labels(*labels).inc(context.images)

    def rejected(self, context: RequestContext) -> None:
        """Count a request that no engine accepted."""
        if context.tenant.name:
            self._requests.labels(self._label(context.tenant.name), context.model, "rejected").inc()

    def _label(self, name: str) -> str:
        """Return the name, or one for all names beyond the first 200."""
        if name not in self._names:
            if len(self._names) >= _MOST_LABELLED:
                return _OTHERS
            self._names.add(name)
        return name


class Tenancy:
    """What a request's tenant may do, and the accounts of what it did."""

    def __init__(self, folder: StateFolder | None, metrics: Metrics, leases: Leases | None = None) -> None:
        """Without a `folder`, usage is kept in memory. Raises `ConfigError`."""
        self.quotas = Quotas(leases)
        self.usage = Usage(folder)
        self.metrics = TenantMetrics(metrics)

    def ended(self, context: RequestContext, outcome: str, engine_seconds: float) -> None:
        """Count an accepted request that ended."""
        self.usage.add(context, engine_seconds)
        self.metrics.ended(context, outcome, engine_seconds)
