"""Neutral load generators and ours against one server of known delays: `python -m tests.clients.agreement`.

AIPerf and GuideLLM run unmodified, in the environments of `make clients`, against chat, completions, embeddings and
rerank of a service whose engine takes 250 ms a step (`lab.paced_engine`). Each tool's own report is kept below --out.
The exit status is 1 if a mean differs from that of `triptych.loadtest`, or of the known delay, by more than 5 %.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from lab.paced_engine import MODULE, PACE
from tests.clients.environments import environment_of, python_of
from tests.clients.table import CLIENTS
from tests.service.processes import ROOT, running
from triptych.model.pretrained import CHECKPOINTS
from triptych.model.system.child_process import ENGINE_VARIABLE

STEP_MS = 250.0
CLIENTS_AT_ONCE, REQUESTS, OUTPUT, PROMPT = 4, 24, 12, 32
ALLOWED = 0.05
LATENCY, FIRST, GAP = "request ms", "first token ms", "between tokens ms"
Means = dict[str, float]

_TOKENIZER = CHECKPOINTS / "assistant"
_BY_NAME = {client.name: client for client in CLIENTS}
_KINDS = {
    "chat": "assistant",
    "completions": "assistant",
    "embeddings": "embed",
    "rerank": "embed",
}  # by route: the model
_WRITES = ("chat", "completions")
# A first token may have no text, such as the mark of a turn; then tools see the second one as the first.
_KNOWN = {kind: {GAP: STEP_MS, LATENCY: OUTPUT * STEP_MS} if kind in _WRITES else {LATENCY: STEP_MS} for kind in _KINDS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/agreement"), help="folder of the reports")
    out = parser.parse_args().out
    shutil.rmtree(out, ignore_errors=True)
    token = Tokenizer.from_file(str(_TOKENIZER / "tokenizer.json")).encode(" the").ids[-1]  # a token with a text
    pace = {ENGINE_VARIABLE: MODULE, PACE: f"{1000 / STEP_MS:g} 1 {token}"}
    far = False
    with running(["--runtime", "local", "assistant", "embed"], variables=pace) as service:
        for kind, model in _KINDS.items():
            means = {"known": _KNOWN[kind], **dict(_measured(kind, model, service.url, out.resolve()))}
            base = means.get("loadtest", means["known"])
            for tool, found in means.items():
                differs = max(abs(value / base[name] - 1) for name, value in found.items())
                far = far or differs > ALLOWED
                shown = "  ".join(f"{name} {value:8.1f}" for name, value in found.items())
                print(f"{kind:<12} {tool:<9} {shown}  differs by {differs:.1%}", flush=True)
    return 1 if far else 0


def _measured(kind: str, model: str, url: str, out: Path) -> Iterator[tuple[str, Means]]:
    for tool, measure in (("loadtest", _loadtest), ("aiperf", _aiperf), ("guidellm", _guidellm)):
        folder = out / kind / tool
        folder.mkdir(parents=True)
        if found := measure(kind, model, url, folder):
            yield tool, found


def _loadtest(kind: str, model: str, url: str, folder: Path) -> Means:
    """Run ours; it has no load of rankings."""
    if kind == "rerank":
        return {}
    target = f"openai-{kind}"
    texts = ["--texts", "1"] if kind == "embeddings" else ["--output-tokens", str(OUTPUT)]
    _run(
        *(sys.executable, "-m", "triptych.loadtest", "run", "--url", url, "--target", target, "--model", model),
        *("--arrivals", "closed", "--concurrency", str(CLIENTS_AT_ONCE), "--requests", str(REQUESTS), *texts),
        *("--prompt-tokens", str(PROMPT), "--quiet", "--out", str(folder)),
        cwd=ROOT,
    )
    found = json.loads((folder / "run.json").read_text())["latency_ms"]
    names = {FIRST: "ttft", GAP: "itl", LATENCY: "e2e"}
    return {name: found[key]["mean"] for name, key in names.items() if found.get(key, {}).get("mean")}


def _aiperf(kind: str, model: str, url: str, folder: Path) -> Means:
    endpoint = {"rerank": "cohere-rankings"}.get(kind, kind)
    writes = kind in _WRITES
    options = (
        ["--streaming", "--output-tokens-mean", str(OUTPUT), "--extra-inputs", "ignore_eos:true"] if writes else []
    )
    if kind == "rerank":
        options = ["--rankings-passages-mean", "4"]
        options += ["--rankings-passages-prompt-token-mean", "32", "--rankings-query-prompt-token-mean", "8"]
    _tool(
        "aiperf",
        *("aiperf", "profile", "--model", model, "--url", url, "--endpoint-type", endpoint, "--ui-type", "none"),
        *("--tokenizer", str(_TOKENIZER), "--request-count", str(REQUESTS), "--concurrency", str(CLIENTS_AT_ONCE)),
        *("--synthetic-input-tokens-mean", str(PROMPT), "--output-artifact-dir", str(folder), *options),
        # Its processes still start while its first requests run, which took 170 ms more each on a busy machine.
        *("--warmup-request-count", str(CLIENTS_AT_ONCE)),
    )
    found = json.loads((folder / "profile_export_aiperf.json").read_text())
    names = {FIRST: "time_to_first_token", GAP: "inter_token_latency", LATENCY: "request_latency"}
    return {name: found[key]["avg"] for name, key in names.items() if key in found}


def _guidellm(kind: str, model: str, url: str, folder: Path) -> Means:
    """Run GuideLLM; it has no load of rankings."""
    route = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "embeddings": "/v1/embeddings"}.get(kind)
    if route is None:
        return {}
    file = folder / "guidellm.json"
    _tool(
        "guidellm",
        *("guidellm", "run", "--disable-console", "--profile", f"kind=concurrent,streams={CLIENTS_AT_ONCE}"),
        *("--output", f"kind=json,path={file}", "--tokenizer", f"kind=huggingface_auto,model={_TOKENIZER}"),
        *("--backend", f"kind=openai_http,target={url},model={model},request_format={route}"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}"),
    )
    [found] = json.loads(file.read_text())["benchmarks"]
    metrics: dict[str, Any] = found["metrics"]
    names = {
        FIRST: ("time_to_first_token_ms", 1),
        GAP: ("inter_token_latency_ms", 1),
        LATENCY: ("request_latency", 1e3),
    }
    if kind == "embeddings":
        names = {LATENCY: names[LATENCY]}
    return {name: metrics[key]["successful"]["mean"] * factor for name, (key, factor) in names.items()}


def _tool(name: str, *command: str) -> None:
    client = _BY_NAME[name]
    python_of(client)
    _run(*command, env=environment_of(client))


def _run(*command: str, **options: Any) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:4])}: {(done.stderr or done.stdout).strip()[-800:]}")


if __name__ == "__main__":
    sys.exit(main())
