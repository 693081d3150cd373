"""When EngineCore tells what it has: at once, or with what the next steps make."""

from __future__ import annotations

from engine.messages import Abort, StepOutput
from tests.fakes.driver import Driver, request
from tests.fakes.runners import CountingRunner

FOR_EVER = 3600.0


def told(driver: Driver) -> list[tuple[list[str], list[str]]]:
    """Of each message: the requests with an output of their own, and those with tokens only."""
    messages = [message for message in driver.messages if isinstance(message, StepOutput)]
    return [([o.request_id for o in message.outputs], [name for name, _ in message.tokens]) for message in messages]


def test_without_an_interval_every_step_is_a_message() -> None:
    driver = Driver(CountingRunner())
    driver.send(request("a", [1, 2, 3], 5))
    driver.run(100)
    assert told(driver) == [(["a"], []), ([], ["a"]), ([], ["a"]), ([], ["a"]), (["a"], [])]


def test_first_tokens_and_ends_go_at_once_and_take_the_others_tokens_along() -> None:
    driver = Driver(CountingRunner(), output_interval_s=FOR_EVER)
    driver.send(request("a", [1, 2, 3], 12))
    for _ in range(4):
        driver.step()
    assert told(driver) == [(["a"], [])]
    driver.send(request("b", [4, 5], 3))
    driver.step()
    assert told(driver)[1:] == [(["b"], ["a"] * 4)]
    driver.run(100)
    assert told(driver)[2:] == [(["b"], ["a", "b", "a"]), (["a"], ["a"] * 4)]
    plain = Driver(CountingRunner())
    plain.send(request("a", [1, 2, 3], 12))
    plain.run(100)
    assert driver.tokens("a") == plain.tokens("a") and len(driver.tokens("b")) == 3
    driver.check_idle()


def test_an_abort_takes_the_tokens_along() -> None:
    driver = Driver(CountingRunner(), output_interval_s=FOR_EVER)
    driver.send(request("a", [1, 2, 3], 50))
    for _ in range(4):
        driver.step()
    driver.send(Abort("a"))
    driver.run(100)
    assert told(driver) == [(["a"], []), (["a"], ["a"] * 3)]
    driver.check_idle()


def test_tokens_wait_no_longer_than_the_interval() -> None:
    driver = Driver(CountingRunner(), output_interval_s=1e-9)  # over whenever it is looked at
    driver.send(request("a", [1, 2, 3], 5))
    driver.run(100)
    assert [len(tokens) for _, tokens in told(driver)] == [0, 1, 1, 1, 0]
