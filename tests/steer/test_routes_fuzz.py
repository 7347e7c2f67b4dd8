"""The routes against requests that their own description gives rise to, right ones and wrong ones."""

import itertools
import random

import pytest
from profiles import count, sized

pytestmark = pytest.mark.host

KEY = "a-key-of-the-server"


@pytest.mark.parametrize("api_key", [None, KEY])
def test_no_request_brings_a_server_error(live, api_key):
    """Sessions come and go meanwhile. With a key that is not given each gets a 401."""
    import schemathesis
    from hypothesis import given
    from hypothesis import strategies as st

    from vllm_omni_session_state.base.ids import redacted_id

    server = live("a", "b/c", "s-0123456789ab", api_key=api_key)
    full = 2000 if api_key is None else 400
    schema = schemathesis.openapi.from_dict(server.app.openapi()).include(path_regex="^/v1/session_state")
    operations = [each.ok() for each in schema.get_all_operations()]
    assert len(operations) == 6
    cases = st.one_of(
        *(
            each.as_strategy(generation_mode=mode)
            for each, mode in itertools.product(operations, schemathesis.GenerationMode)
        )
    )
    known = ["a", "b/c", "s-0123456789ab", *map(redacted_id, ("a", "b/c"))]
    dice, seen = random.Random(0), []

    @sized(full)
    @given(cases)
    def ask(case):
        server.engine.begin(dice.choice(known[:3]))
        if "name" in (case.path_parameters or {}) and dice.random() < 0.5:
            case.path_parameters["name"] = dice.choice(known)
        answer = case.call(base_url=server.url, timeout=300)
        seen.append(answer.status_code)
        assert answer.status_code < 500, (case, answer.text)
        if api_key is not None:
            assert answer.status_code in (401, 404, 405), case
            assert answer.status_code == 401 or not answer.request.url.startswith(f"{server.url}/v1")
        else:
            case.validate_response(answer, excluded_checks=[])

    ask()
    assert len(seen) >= count(full)
    assert set(seen) >= ({401} if api_key else {200, 404, 422})
