"""Runs schemathesis against a server over a fake model: scripts/fuzz.

The engine, the grammars and all of the HTTP side are the real ones; only the logits are made up.
"""

from __future__ import annotations

import subprocess
import sys

from serve_harness import real_server

# Left out: positive_data_acceptance. Rules over several fields (prompt or messages, min_tokens
# at most max_tokens, ids within the vocabulary) stand in no schema, and breaking them is a 400.
_CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,unsupported_method,"
    "response_headers_conformance,response_schema_conformance,negative_data_rejection"
)


def main(schemathesis: str, arguments: list[str]) -> int:
    """schemathesis' exit code: 0 when it found nothing."""
    with real_server({"p": "x"}, max_model_len=24, num_pages=400) as server:
        command = [
            schemathesis,
            "run",
            f"{server.url}/openapi.json",
            "--checks",
            _CHECKS,
            *(arguments or ["--max-examples", "100"]),
        ]
        code = subprocess.run(command, check=False).returncode
        assert server.engine.alive, "the engine died"
        assert server.engine.drain(30), "requests were left behind"
        return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
