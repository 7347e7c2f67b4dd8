"""``python -m vllm_omni_session_state.cli``, for where the command itself is not on the path."""

from __future__ import annotations

import sys

from vllm_omni_session_state.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
