"""Answers graded by token id (issue 3, E4): against the logits of a plain transformers model, far outside the likeliest tokens too."""

import re

import pytest
import torch
from spaceless import spaceless, warned

from midstream import Patch
from midstream.errors import PromptError, TraceError
from midstream.requests.arguments import MAX_ANSWERS, Answers, answers_of

PROMPTS = ["The capital of France is", "The capital of Italy is"]
GREEDY = {"max_tokens": 1, "temperature": 0.0}


def logprobs(plain, prompt, edits=None):
    """float32 `[vocabulary]` of the token behind the prompt."""
    return plain.run(prompt, edits).logits[-1].float().log_softmax(-1)


def test_answers_are_exact_however_unlikely(model, plain):
    """Every hundredth token of the vocabulary, of which hardly one is among the twenty likeliest."""
    answers = list(range(0, model.vocab_size, 100))[:100]
    outputs = model.generate(PROMPTS, answers=answers, **GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = logprobs(plain, prompt)
        assert len(set(expected.topk(20).indices.tolist()) & set(answers)) < 10
        assert list(output.answers) == answers
        torch.testing.assert_close(torch.tensor(list(output.answers.values())), expected[answers], rtol=1e-4, atol=1e-4)


def test_answers_are_texts_of_one_token_each_prompt_may_have_its_own(model, plain):
    france, italy = model.generate(PROMPTS, answers=[[" Paris", " Rome"], [" Rome"]], **GREEDY)
    assert france.answers[" Paris"] == pytest.approx(
        float(logprobs(plain, PROMPTS[0])[plain.token(" Paris")]), abs=1e-4
    )
    assert france.answers[" Rome"] == pytest.approx(float(logprobs(plain, PROMPTS[0])[plain.token(" Rome")]), abs=1e-3)
    assert list(italy.answers) == [" Rome"]
    assert italy.answers[" Rome"] > -1 > france.answers[" Rome"]
    (one,) = model.generate(PROMPTS[0], answers=" Paris", **GREEDY)
    assert one.answers == pytest.approx({" Paris": france.answers[" Paris"]}, abs=1e-4)
    assert model.generate(PROMPTS[0], **GREEDY)[0].answers == {}


def test_answers_are_those_of_the_patched_run(model, plain):
    """In a batch beside a plain request. The oracle patches by a hook."""
    vector = torch.linspace(-2, 2, model.hidden_size)
    patch = Patch("resid_post", layer=5, position=4, source=vector)

    def write(h_TH):
        h_TH[4] = vector
        return h_TH

    patched, untouched = model.generate([PROMPTS[0]] * 2, plan=[[patch], None], answers=[" Paris", 0], **GREEDY)
    for output, edits in ((patched, {("resid_post", 5): write}), (untouched, None)):
        expected = logprobs(plain, PROMPTS[0], edits)[[plain.token(" Paris"), 0]]
        torch.testing.assert_close(torch.tensor(list(output.answers.values())), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("tokens", [1, 3])
def test_answers_are_about_the_first_token_and_before_temperature(model, plain, tokens):
    (output,) = model.generate(PROMPTS[0], answers=[" Paris"], max_tokens=tokens, temperature=0.7, seed=1)
    assert output.answers[" Paris"] == pytest.approx(
        float(logprobs(plain, PROMPTS[0])[plain.token(" Paris")]), abs=1e-4
    )


def test_an_answer_of_several_tokens_is_an_error_that_says_so(model):
    with pytest.raises(
        PromptError, match=r"' Paris Rome' is 2 tokens: ' Paris' \(\d+\), ' Rome' \(\d+\)\. .* one token"
    ):
        model.generate(PROMPTS, answers=[" Paris", " Paris Rome"], **GREEDY)


def test_what_cannot_be_an_answer_is_an_error_that_says_what_can(model):
    with pytest.raises(PromptError, match="'' is 0 tokens: none"):
        model.generate(PROMPTS, answers=[""], **GREEDY)
    with pytest.raises(PromptError, match=f"token id {model.vocab_size}; this model's are 0 to {model.vocab_size - 1}"):
        model.generate(PROMPTS, answers=[model.vocab_size], **GREEDY)
    with pytest.raises(PromptError, match=r"1\.5"):
        model.generate(PROMPTS, answers=[1.5], **GREEDY)
    with pytest.raises(PromptError, match="3 were given for 2"):
        model.generate(PROMPTS, answers=[[1], [2], [3]], **GREEDY)
    with pytest.raises(PromptError, match="takes the place of logprobs"):
        model.generate(PROMPTS, answers=[1], logprobs=5, **GREEDY)
    with pytest.raises(TraceError, match=r"model\.logits"), model.generate(PROMPTS[0], answers=[1], **GREEDY):
        pass


def test_a_list_for_all_prompts_and_one_for_each_are_told_apart():
    assert answers_of([3, 4], 2, None, 10) == [{3: 3, 4: 4}] * 2
    assert answers_of([[3], (4, 5)], 2, None, 10) == [{3: 3}, {4: 4, 5: 5}]
    assert answers_of([[3]], 1, None, 10) == answers_of(3, 1, None, 10) == [{3: 3}]
    with pytest.raises(PromptError, match="True"):
        answers_of(True, 1, None, 10)


def test_an_answer_that_lacks_its_space_is_warned_of(model, plain):
    """Once for a call. The log-probabilities stay those of the given answers."""
    text, times = spaceless(plain, PROMPTS[1], 300, 1e4)
    outputs = []
    (message,) = warned(lambda: outputs.extend(model.generate(PROMPTS[1], answers=[" Rome", text], **GREEDY)))
    said = re.fullmatch(
        rf"answers has '{text}'\. After the prompt the token ' {text}' is ([\d,]+) times as likely: .* give ' {text}'\.",
        message,
    )
    assert int(said[1].replace(",", "")) == pytest.approx(times, rel=0.05)
    expected = logprobs(plain, PROMPTS[1])[[plain.token(" Rome"), plain.token(text)]]
    assert list(outputs[0].answers) == [" Rome", text]
    torch.testing.assert_close(torch.tensor(list(outputs[0].answers.values())), expected, rtol=1e-4, atol=1e-3)
    (message,) = warned(lambda: model.generate(PROMPTS, answers=[[" Paris"], ["Rome", text]], max_tokens=3))
    assert "answers has 'Rome'. After prompt 1 the token ' Rome' is more than 1,000,000 times as likely" in message
    assert message.endswith(f"If you mean that word, give ' Rome'. The same holds for ['{text}'].")


def test_an_answer_that_may_stand_without_a_space_is_not_warned_of(model, plain):
    """Nor is one that was given as a token id, or in both forms."""
    text, _ = spaceless(plain, PROMPTS[0], 5, 70)
    assert not warned(lambda: model.generate(PROMPTS[0], answers=[text, " Paris", plain.token("Paris")], **GREEDY))
    assert not warned(lambda: model.generate(PROMPTS[0], answers=["Paris", " Paris"], **GREEDY))


def test_texts_with_a_space_are_graded_as_far_as_there_is_room():
    """vLLM takes no more tokens for a request."""
    spaced = {number: (f" {number}", 1000 + number) for number in range(MAX_ANSWERS)}
    for count in (1, MAX_ANSWERS - 1, MAX_ANSWERS):
        answers = Answers({number: number for number in range(count)}, spaced)
        assert len(answers.token_ids) == len({*answers.token_ids}) <= MAX_ANSWERS
        assert answers.token_ids[:count] == [*answers]
