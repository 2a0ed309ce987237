"""An operator's program: deploys the service on a Ray of its own, and again with a changed setting on each SIGHUP.

`python -m loadtest.faults.operator MODEL --replicas N --port PORT [--surge]`; SIGTERM ends it. It deploys what
`serve run` would: the `application` at its import path, with arguments.
"""

from __future__ import annotations

import argparse
import itertools
import signal

from model.api.messages import ModelSpec
from model.pretrained import embedded_models
from service.runtimes.ray_serve import environment
from service.settings.serve_config import ServeConfig

CHANGED = "max_n"  # the setting that each deployment raises by one
FIRST = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--surge", action="store_true")
    asked = parser.parse_args()
    name, _, path = asked.model.partition("=")
    arguments = {
        "models": {name: path or str(embedded_models()[name])},
        "replicas": asked.replicas,
        "surge": asked.surge,
    }
    signals = {signal.SIGHUP, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # they wait for `sigwait`
    with environment.prepared(ServeConfig((ModelSpec(name, path),))) as folder:
        import ray
        from ray import serve

        from service.runtimes.ray_serve.deployment import application

        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=80 << 20,
            _temp_dir=str(folder),
        )
        serve.start(http_options={"host": "127.0.0.1", "port": asked.port})
        try:
            for value in itertools.count(FIRST):
                serve.run(application({**arguments, CHANGED: value}), name="triptych", route_prefix="/")
                if signal.sigwait(signals) == signal.SIGTERM:
                    break
        finally:
            serve.shutdown()
            ray.shutdown()


if __name__ == "__main__":
    main()
