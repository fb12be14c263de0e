"""Owners take turns, each in its own order."""

from __future__ import annotations

from typing import Any

import pytest

from engine_driver import Answer, Driver, make_request
from fake_runner import FakeRunner
from serve_harness import fake_server
from shark_llm.engine.request import Request
from shark_llm.engine.scheduler import LEAST_LPM_WINDOW, LPM_WINDOW


def make_driver(**settings: Any) -> Driver:
    runner = FakeRunner(page_size=4, num_pages=80, vocab_size=512, max_model_len=120)
    return Driver(runner, **({"max_num_seqs": 1, "max_num_batched_tokens": 64} | settings))


def admissions(driver: Driver) -> list[str]:
    """Run to the end; the owners, in the order of their admissions."""
    order: list[str] = []
    plan_step = driver.scheduler.plan

    def plan() -> Any:
        result = plan_step()
        order.extend(state.request.owner for state in result.admitted)
        return result

    driver.scheduler.plan = plan  # type: ignore[method-assign]
    driver.run()
    return order


def ask(driver: Driver, owner: str, *, prompt: list[int] | None = None) -> Answer:
    own = [driver.num_added, ord(owner)] if prompt is None else prompt
    return driver.add(own, max_tokens=1, owner=owner)


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_a_flood_of_one_owner_holds_up_nobody_else(policy: str) -> None:
    driver = make_driver(scheduling_policy=policy)
    for _ in range(200):
        ask(driver, "a")
    for _ in range(3):
        ask(driver, "b")
    ask(driver, "c")
    assert "".join(admissions(driver)) == "abcabab" + "a" * 197


def test_one_after_the_other_gains_nothing() -> None:
    """An owner that always has just one request waiting does not go before others each time."""
    driver = make_driver()
    for _ in range(5):
        ask(driver, "a")
    order: list[str] = []
    while driver.scheduler.waiting or driver.core.has_requests:
        if len(order) < 9 and not any(s.request.owner == "b" for s in driver.scheduler.waiting):
            ask(driver, "b")
        before = {s.request.request_id: s.request.owner for s in driver.scheduler.waiting}
        driver.step()
        after = {s.request.request_id for s in driver.scheduler.waiting}
        order += [owner for name, owner in before.items() if name not in after]
    assert "".join(order[:9]) == "ababababa"


def test_a_big_request_in_its_turn_is_waited_for() -> None:
    """E13 across owners: small requests of others do not keep the pages from it."""
    driver = make_driver(max_num_seqs=8, enable_prefix_caching=False)
    for i in range(4):
        driver.add([i] * 60, max_tokens=4, owner="a")
    driver.step()
    big = driver.add([9] * 100, max_tokens=1, owner="b")
    small = [ask(driver, "a") for _ in range(6)]
    assert "".join(admissions(driver)).startswith("b" + "a")
    assert big.done
    assert all(answer.done for answer in small)


def test_within_an_owner_lpm_still_prefers_the_longest_prefix() -> None:
    driver = make_driver(scheduling_policy="lpm")
    warm = list(range(40))
    driver.ask(warm, max_tokens=1, owner="a")
    cold = ask(driver, "a", prompt=[400, 401, 402])
    hit = ask(driver, "a", prompt=[*warm, 7])
    other = ask(driver, "b")
    driver.step()
    assert other.done  # "a" was served last, before these came
    driver.step()
    assert hit.done
    assert not cold.done
    driver.run()


def test_every_owner_has_a_window_of_its_own() -> None:
    """lpm looks at a part of the queue; a flood must not fill it alone."""
    driver = make_driver(scheduling_policy="lpm")
    for _ in range(LPM_WINDOW + 10):
        ask(driver, "a")
    ask(driver, "b")
    assert LEAST_LPM_WINDOW >= 1
    assert admissions(driver)[:2] == ["a", "b"]


def test_the_key_names_the_owner_and_is_not_it() -> None:
    seen: list[Request] = []
    with fake_server({"p": "x"}, settings={"api_keys": ("secret-a", "secret-b")}) as server:
        submit = server.engine.submit

        def record(request: Request) -> None:
            seen.append(request)
            submit(request)

        server.engine.submit = record  # type: ignore[method-assign]
        for key in ("secret-a", "secret-b", "secret-a"):
            headers = {"Authorization": f"Bearer {key}"}
            response = server.post("/v1/completions", {"prompt": "p"}, headers=headers)
            assert response.status_code == 200
    owners = [request.owner for request in seen]
    assert owners[0] == owners[2] != owners[1]
    assert not any("secret" in owner for owner in owners)


def test_without_keys_all_are_one() -> None:
    assert make_request("r", [1], Answer()).owner == ""
