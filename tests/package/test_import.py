"""Importing the package costs nothing and needs nobody; its entry point never raises."""

import subprocess
import sys

PRELUDE = """
import sys
class Absent:
    def __init__(self, *names): self.names = names
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in self.names: raise ModuleNotFoundError(name, name=name)
"""


def run(code: str) -> str:
    """Run code in a new interpreter; its output, both streams."""
    done = subprocess.run([sys.executable, "-c", PRELUDE + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_importing_the_package_and_registering_take_neither_torch_nor_the_host():
    out = run(
        "import vllm_omni_session_state, vllm_omni_session_state.plugin as plugin; plugin.register();"
        "print(sorted({'torch', 'numpy', 'vllm', 'vllm_omni'} & set(sys.modules)))"
    )
    assert out.strip() == "[]"


def test_it_imports_and_registers_where_neither_torch_nor_the_host_is_installed():
    out = run(
        "sys.meta_path.insert(0, Absent('torch', 'vllm', 'vllm_omni', 'numpy'));"
        "import vllm_omni_session_state, vllm_omni_session_state.plugin as plugin;"
        "plugin.register(); plugin.register()"
    )
    assert out == ""


def test_the_library_works_where_the_host_is_not_installed():
    out = run(
        "sys.meta_path.insert(0, Absent('vllm', 'vllm_omni'));"
        "from vllm_omni_session_state import SessionStateManager;"
        "SessionStateManager().get_or_create_session('a').attrs['x'] = 1; print('ok')"
    )
    assert out.strip() == "ok"


def test_a_name_that_is_not_there_is_an_attribute_error():
    out = run(
        "import vllm_omni_session_state as package\n"
        "try: package.nothing\n"
        "except AttributeError as error: print(error)\n"
        "print(set(package.__all__) <= set(dir(package)))"
    )
    assert "nothing" in out
    assert "True" in out


def test_registering_never_raises_and_says_why_it_did_not_start():
    out = run(
        "import vllm_omni_session_state.omni.hooks.import_hook as import_hook\n"
        "import vllm_omni_session_state.plugin as plugin\n"
        "def broken(name, then): raise RuntimeError('no room')\n"
        "import_hook.when_imported = broken; plugin.register()"
    )
    assert "RuntimeError: no room" in out
    assert "keeps its own session state" in out
