"""Built-in verifiers: accepted and refused answers, and functions and settings that are refused before anything
runs.
"""

import json
import os
from decimal import Decimal
from pathlib import Path

import pytest

from braidrl.errors import UserError
from braidrl.rewards.math_equivalence import equivalent
from braidrl.rewards.verifier import resolve
from braidrl.rewards.verifiers import exact, f1, final_number, follows_format, gsm8k

OWN = str(Path(__file__).with_name("own_verifiers.py"))
SHARED = Path(os.environ.get("BRAID_SHARED", Path(__file__).parents[3] / "shared"))
GSM8K = [SHARED / "data" / "gsm8k" / name for name in ("train.jsonl", "test.jsonl")]


@pytest.mark.skipif(not all(path.is_file() for path in GSM8K), reason=f"no GSM8K files in {SHARED}; set BRAID_SHARED")
def test_every_gsm8k_gold_answer_is_accepted_and_refused_plus_one():
    golds = [json.loads(line)["answer"] for path in GSM8K for line in path.read_text().splitlines()]
    assert len(golds) == 8792
    for gold in golds:
        written = gold.rpartition("####")[2].strip()
        bare = Decimal(written.replace(",", "").replace("$", ""))
        assert gsm8k(gold, gold) and gsm8k(f"So it is\n#### {bare}", gold) and gsm8k(gold, written)
        assert not gsm8k(f"So it is\n#### {bare + 1}", gold) and not gsm8k(f"#### {bare + 1}", written)


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("#### $1,234.50.", "1234.5"),
        ("#### -5", "-5"),
        ("#### −5", "-5"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("####\n 7", "7"),
        ("#### 5 apples", "5"),
        ("#### .5", "0.5"),
        ("#### 10%", "10"),
        ("#### **8**", "8"),
        ("#### 3, no: #### 4", "4"),
        ("#### 1,000,000", "1000000"),
        ("#### 5.00", "5"),
        ("####0", "0"),
        ("#### 5,", "5"),
        ("#### 1.5e3", "1500"),
        ("#### 5eggs", "5"),
    ],
)
def test_the_final_number_is_read_as_people_write_it(line, number):
    assert final_number(line) == Decimal(number)


@pytest.mark.parametrize("line", ["#### five", "####", "5", "#### 1/2", "#### 12/3", "#### 2:30", "#### 2^3"])
def test_what_is_not_one_plain_number_is_no_answer(line):
    assert final_number(line) is None
    assert not gsm8k(line, "#### 1") and not gsm8k(line, "#### 2")


def test_gsm8k_needs_the_mark_unless_flexible():
    assert not gsm8k("The answer is 5.", "#### 5")
    assert gsm8k("Of 12 there are 5.", "#### 5", flexible=True)
    assert not gsm8k("Of 5 there are 12.", "#### 5", flexible=True)
    assert gsm8k("10-7=3", 3, flexible=True)
    assert not gsm8k("#### 6 and not 5", "5", flexible=True)


def test_a_reference_without_a_number_is_an_error_and_not_wrong():
    with pytest.raises(ValueError, match="holds no number"):
        gsm8k("#### 5", "five")


def test_exact_compares_all_the_last_line_or_a_group():
    assert exact(" 12\n", 12) and not exact("= 12", "12")
    assert exact("3*4\n12 \n\n", "12", last_line=True) and not exact("", "12", last_line=True)
    tagged = "<answer>11</answer> no, <answer> 12 </answer>"
    assert exact(tagged, "12", pattern="<answer>(.*?)</answer>") and not exact(
        tagged, "11", pattern="<answer>(.*?)</answer>"
    )
    assert exact("it is 12", "12", pattern=r"\d+$") and not exact("none", "12", pattern=r"\d+")


def test_format_matches_the_whole_response_over_several_lines():
    pattern = "<think>.*</think>\\s*<answer>.*</answer>"
    assert follows_format("<think>a\nb</think>\n<answer>1</answer>\n", pattern=pattern)
    assert not follows_format("well, <think>a</think><answer>1</answer>", pattern=pattern)


EQUIVALENT = [
    ("1/2", r"The answer is \boxed{\frac{1}{2}}"),
    (r"\frac12", "0.5"),
    (r"$\frac{1}{2}$", r"\boxed{\frac{2}{4}}"),
    (r"\boxed{2\sqrt{3}}", r"so $\sqrt{12}$"),
    ("(1,2]", r"hence $x\in(1,2]$"),
    (r"\{1,2,3\}", r"\boxed{\{3,1,2\}}"),
    ("x^2+2x+1", "$(x+1)^2$"),
    ("1,234", r"\boxed{1234}"),
    (5, "x=5"),
    (r"\text{east}", r"\boxed{east}"),
    (r"(-\infty, 3)\cup(5,\infty)", r"$(5, \infty) \cup (-\infty,3)$"),
    (r"(3, \frac{\pi}{2})", r"\boxed{(3, \pi/2)}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"$$\begin{pmatrix}1\\2\end{pmatrix}$$"),
    (r"\$18", r"\boxed{18}"),
    (r"\frac{1}{2006!}", r"\boxed{\frac{1}{2006!}}"),
    ("1234", r"\boxed{1\,234}"),
    (r"1\,234\,567", r"\boxed{1234567}"),
    ("12345", r"\boxed{12{,}345}"),
    (r"\frac{1}{\sqrt{n}}", r"\boxed{\sqrt{1/n}}"),
    (r"\frac{\sqrt{a}}{\sqrt{b}}", r"\boxed{\sqrt{\frac{a}{b}}}"),
    (r"-\ln x", r"\boxed{\ln(1/x)}"),
    (["0.5", "2"], r"\boxed{\frac12}"),
    ('["34"]', r"\boxed{34}"),
    ([3, 4], r"\boxed{4}"),
    (r"\frac13", r"\boxed{0.333333}"),
    (r"50\%", r"\boxed{0.5}"),
    (r"\frac13", r"\boxed{0.\overline{3}}"),
    (r"-0.1\overline{6}", r"\boxed{-\frac16}"),
    ("-1", r"\boxed{e^{i\pi}}"),
    ("5", r"\boxed{(2+i)(2-i)}"),
    ("101_2", r"\boxed{101_{2}}"),
    ("101_2", r"\boxed{101}"),
    ("(-2,3)", r"\boxed{-2<x<3}"),
    (r"[3,\infty)", r"\boxed{x \ge 3}"),
    ("|x|<1", r"\boxed{(-1,1)}"),
    (r"(-\infty,2)\cup(2,\infty)", r"\boxed{x \neq 2}"),
    (r"(-\infty,-1)\cup(2,\infty)", r"\boxed{x<-1 \text{ or } x>2}"),
    (r"\emptyset", r"\boxed{\varnothing}"),
    (r"\cos 15^\circ", r"\boxed{\frac{\sqrt{6}+\sqrt{2}}{4}}"),
    (r"\tan^2(60^{\circ})", r"\boxed{3}"),
    ("10^{10^{10}}", r"\boxed{10^{10^{10}}}"),
    ("4^{2^{99}}", r"\boxed{2^{2^{100}}}"),
    ("1000000!", r"so it is $\boxed{1000000!}$."),
    ("7/3", r"\boxed{2 1/3}"),
    ("-2.5", r"\boxed{-2 1/2}"),
    ("1500", r"\boxed{1.5e3}"),
    (r"3\times 10^{-5}", r"\boxed{3E-5}"),
    (r"\frac13", r"\boxed{0.333...}"),
    (r"-\frac16", r"\boxed{-0.1666\ldots}"),
    (r"\frac{1}{7}", r"\boxed{0.142857142857\dots}"),
    ("5", "\\boxed{\u20ac5}"),
    ("5", r"\boxed{5\pounds}"),
    ("90", "\\boxed{90\u00b0}"),
    ("9", r"\fbox{9}"),
    ("(1,2)", r"\boxed{\langle 1, 2\rangle}"),
    ("123456", "The answer is $123456$, I earned 99999!"),
    ("5", "so\n<answer>5</answer>"),
    ("5", r"\boxed5"),
    (r"\frac{\pi}{4}", r"\boxed{\tan^{-1} 1}"),
    ("1,2", r"\boxed{1~\text{and}~2}"),
    ("1234", r"\boxed{1~234}"),
    ("2:3", r"\boxed{\text{2:3}}"),
    ("5", r"\boxed{5.}"),
    ("3+2i", r"\boxed{3+2\mathrm{i}}"),
    ("10", r"\boxed{\binom52}"),
]
DIFFERENT = [
    ("1/2", r"\boxed{\frac{1}{3}}"),
    ("(1,2]", r"\boxed{[1,2]}"),
    (r"\{1,2,3\}", r"\boxed{\{1,2\}}"),
    (r"2\sqrt{3}", r"\boxed{2}"),
    ("2", r"\boxed{1} or \boxed{2}"),
    ("5", "no idea"),
    ("5", ""),
    ("x^2+1", "$(x+1)^2$"),
    (r"(3, \frac{\pi}{2})", r"\boxed{(\frac{\pi}{2}, 3)}"),
    (r"\frac{1}{2004!}", r"\boxed{\frac{1}{2006!}}"),
    ("2^{-999}", r"\boxed{2^{-1000}}"),
    ("10^{-8}", r"\boxed{10^{-9}}"),
    (r"|x|", r"\boxed{x}"),
    ("x", r"\boxed{\sqrt{x^2}}"),
    ("1234", r"\boxed{1\,23}"),
    ("12_3", r"\boxed{12_4}"),
    (r"1\,011_{2}", r"\boxed{1011_3}"),
    (r"0.\overline{3}", r"\boxed{0.3}"),
    ("2-3i", r"\boxed{2+3i}"),
    (r"10^{15}", r"\boxed{10^{15}+1}"),
    (["1", "2"], r"\boxed{3}"),
    ('["34"]', r"\boxed{3}"),
    ("(-2,3)", r"\boxed{-2<x\le3}"),
    ("-2<y<3", r"\boxed{-2<x<3}"),
    (r"\cos 15^\circ", r"\boxed{\cos 15}"),
    ("7", r"\boxed{10^{10^{10}}}"),
    ("9^{9^8}", r"\boxed{9^{9^9}}"),
    ("2^{2^{101}}", r"\boxed{2^{2^{100}}}"),
    ("1000001!", r"\boxed{1000000!}"),
    ("3", r"\boxed{(1000000)!!}"),
    ("6", "so\n<answer>5</answer>"),
    (r"\binom{1000000}{2}", r"\boxed{\binom{1000000}{500000}}"),
    ("2/3", r"\boxed{2 1/3}"),
    ("150", r"\boxed{1.5e3}"),
    (r"\frac13", r"\boxed{0.666...}"),
    (r"\frac13", r"\boxed{0.333}"),
]


@pytest.mark.parametrize(
    ("answer", "response", "equal"), [*((*pair, True) for pair in EQUIVALENT), *((*pair, False) for pair in DIFFERENT)]
)
def test_mathematics_is_accepted_if_it_is_equivalent(answer, response, equal):
    assert equivalent(response, answer) is equal


def test_math_can_insist_on_a_box_and_needs_a_reference():
    assert equivalent("5", "5") and not equivalent("5", "5", boxed=True) and equivalent(r"\boxed{5}", "5", boxed=True)
    with pytest.raises(ValueError, match="cannot be read"):
        equivalent("5", "")


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("gsm8", {}, "'gsm8'. Did you mean 'gsm8k'"),
        ("gsm8k", {"flexibel": True}, "setting 'flexibel'. Did you mean 'flexible'"),
        ("format", {}, "parameter 'pattern' is none of prompt"),
        ("format", {"pattern": "("}, "is no regular expression"),
        ("exact", {"answer": "1"}, "'answer' comes from the row"),
        (f"{OWN}:unknown_parameter", {}, "parameter 'reference' is none of prompt"),
        (f"{OWN}:lenght", {}, "Did you mean 'length'"),
        (f"{OWN}:length", {"most": {1, 2}}, "plain YAML values"),
        ("no_such_module:judge", {}, "cannot import 'no_such_module'"),
        ("builtins:max", {}, "parameters"),
    ],
)
def test_what_cannot_be_called_is_refused_in_one_line(name, settings, message):
    with pytest.raises(UserError) as caught:
        resolve(name, settings)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_function_gets_what_it_names_and_its_settings():
    fields = {"prompt": "p", "response": "r" * 4, "answer": "a", "metadata": {}, "source": "s"}
    assert resolve(f"{OWN}:length", {"most": 8})(fields) == 0.5
    assert resolve(f"{OWN}:any_settings", {"base": 2.0})(fields) == 2.0
    assert resolve(f"{OWN}:remote").asynchronous and not resolve(f"{OWN}:length").asynchronous


def test_f1_equals_a_plain_word_count_and_takes_the_best_answer():
    def counted(response: list[str], answer: list[str]) -> float:
        left, common = list(answer), 0
        for word in response:
            if word in left:
                left.remove(word)
                common += 1
        return 2 * common / (len(response) + len(answer))

    response, answers = "The quick, quick fox!", ["a quick fox", "Quick quick dog", "an owl"]
    words = [["quick", "fox"], ["quick", "quick", "dog"], ["owl"]]
    scores = [counted(["quick", "quick", "fox"], each) for each in words]
    assert [f1(response, each).score for each in answers] == pytest.approx(scores) == [0.8, 2 / 3, 0.0]
    assert f1(response, answers).score == pytest.approx(0.8) and not f1(response, answers).correct
    assert f1(response, answers, correct_from=0.5).correct and f1("A fox.", "fox").correct
    assert f1("the", "An").score == 1 and f1("", "fox").score == f1("fox", "").score == 0
