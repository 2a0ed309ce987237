#!/bin/sh
# A load of 4 requests a second for 10 s: sh examples/load.sh http://127.0.0.1:8000
exec .venv/bin/python -m triptych.loadtest run --url "${1:?name the service}" --model code --rate 4 --duration 10 \
    --output-tokens 16 --slo "error_rate<1%"
