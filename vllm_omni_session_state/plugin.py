"""The entry point that vLLM-Omni calls in the parent and in every worker before it loads a model."""

from __future__ import annotations


def register() -> None:
    """Hook vLLM-Omni's loader and API server. Idempotent; imports neither vLLM nor torch; never raises."""
    try:
        # Imported here: an import error must not escape.
        from vllm_omni_session_state.base import ids  # noqa: PLC0415
        from vllm_omni_session_state.omni.hooks import loader, seams  # noqa: PLC0415
        from vllm_omni_session_state.omni.hooks.import_hook import when_imported  # noqa: PLC0415
        from vllm_omni_session_state.omni.replicas import pools  # noqa: PLC0415
        from vllm_omni_session_state.omni.server import hooks  # noqa: PLC0415

        ids.export_key()  # whatever the flag says: the workers inherit it, and no config is read yet
        when_imported(seams.LOADER_MODULE, loader.wrap)
        when_imported(seams.RUNTIME_MODULE, pools.wrap)
        when_imported(seams.SERVER_MODULE, hooks.wrap)
    except Exception as error:  # noqa: BLE001 - raising here would end vLLM-Omni's process
        import logging  # noqa: PLC0415

        logging.getLogger("vllm_omni.session_state").warning(
            "the session state plugin did not start: %s: %s; every model keeps its own session state",
            type(error).__name__,
            error,
        )
