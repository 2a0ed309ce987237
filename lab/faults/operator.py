"""A program that deploys the service in its own Ray session, and redeploys it with a changed setting on each SIGHUP.

`python -m lab.faults.operator MODEL --replicas N --port PORT [--surge]`; SIGTERM ends it. As `serve run` would, it
deploys the `application` at its import path, with arguments.
"""

from __future__ import annotations

import argparse
import itertools
import signal

from triptych.model.api.messages import ModelSpec
from triptych.model.pretrained import embedded_models
from triptych.service.runtimes.ray_serve import environment
from triptych.service.settings.serve_config import ServeConfig

CHANGED = "max_n"  # the setting that each deployment increases by one
FIRST = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--surge", action="store_true")
    options = parser.parse_args()
    name, _, path = options.model.partition("=")
    arguments = {
        "models": {name: path or str(embedded_models()[name])},
        "replicas": options.replicas,
        "surge": options.surge,
    }
    signals = {signal.SIGHUP, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # received by `sigwait`
    with environment.prepared(ServeConfig((ModelSpec(name, path),))) as folder:
        import ray
        from ray import serve

        from triptych.service.runtimes.ray_serve.deployment import application

        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=80 << 20,
            _temp_dir=str(folder),
        )
        serve.start(http_options={"host": "127.0.0.1", "port": options.port})
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
