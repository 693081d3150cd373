"""Tables of names: what other servers call a format, and what a template that writes it contains."""

HARMONY = "harmony"
RESPONSE_TEMPLATE = "response_template"

TOOL_ALIASES = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_json": "hermes",
    "granite4": "hermes",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "openai": HARMONY,
    "gpt_oss": HARMONY,
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_dsml",
    "deepseekv4": "deepseek_dsml",
    "deepseek_v32": "deepseek_dsml",
    "deepseek_v4": "deepseek_dsml",
    "deepseek_v41": "deepseek_dsml",
    "glm": "glm45",
    "glm47": "glm45",
    "llama4_pythonic": "pythonic",
    "granite_20b_fc": "granite",
    "minimax": "minimax_m2",
    "phi4_mini_json": "phi4_mini",
    "interns1": "internlm",
    "jamba": "tool_calls",
    "hunyuan_a13b": "tool_calls",
    "cohere_command3": "cohere",
    "cohere_command4": "cohere",
    "hf": RESPONSE_TEMPLATE,
}
REASONING_ALIASES = {
    "deepseek_r1": "think_always",
    "qwen3_thinking": "think_always",
    "openai_gptoss": HARMONY,
    "gpt_oss": HARMONY,
    "cohere_command3": "cohere",
    "cohere_command4": "cohere",
    "apertus2509": "apertus",
    "hf": RESPONSE_TEMPLATE,
} | dict.fromkeys(
    "qwen3 glm45 kimi_k2 step3 step3p5 ernie45 minimax minimax_m2 minimax_m2_append_think minimax_append_think "
    "nemotron_v3 nemotron_3 olmo3 hunyuan_a13b mimo holo2 ling3 deepseek_v3 deepseek_v31 deepseek_v4 deepseek_v41 "
    "interns1 poolside_v1".split(),
    "think",
)

# What a template writes -> the format; the first pattern that occurs decides.
TOOL_MARKS = (
    (r"｜DSML｜", "deepseek_dsml"),
    (r"<\|channel\|>.*<\|message\|>|<\|message\|>.*<\|channel\|>", HARMONY),
    (r"<｜tool▁call▁begin｜>.*```json", "deepseek_v3"),
    (r"<｜tool▁call▁begin｜>", "deepseek_v31"),
    (r"<\|tool_call_begin\|>", "kimi_k2"),
    (r"<arg_key>", "glm45"),
    (r"<minimax:tool_call>", "minimax_m2"),
    (r"<atem:invoke ", "muse_glimmer"),
    (r"<function name=.*<param name=", "minicpm5"),
    (r"<seed:tool_call>", "seed_oss"),
    (r"<function=.*<parameter=", "qwen3_coder"),
    (r"\[TOOL_CALLS\].*\[ARGS\]", "mistral_v11"),
    (r"\[TOOL_CALLS\]", "mistral"),
    (r"<\|tool_call>", "gemma4"),
    (r"<start_function_call>", "functiongemma"),
    (r"<\|tool_call_start\|>|<\|tool_list_start\|>", "lfm2"),
    (r"<function_calls>", "olmo3"),
    (r"functools", "phi4_mini"),
    (r"<\|action_start\|>", "internlm"),
    (r"<\|START_ACTION\|>", "cohere"),
    (r"Action:(?:\s|\\n)*```json", "command_r"),
    (r"<\|function_call\|>", "gigachat3"),
    (r"<TOOLCALL>", "nemotron"),
    (r"<tool_calls>", "tool_calls"),
    (r"<tool_call>", "hermes"),
    (r"<\|tool_call\|>|<function_call>", "granite"),
    (r"<\|python_start\|>|func_name1\(", "pythonic"),
    (r"<\|python_tag\|>|[\"']parameters[\"']\s*:.*ipython|ipython.*[\"']parameters[\"']\s*:", "llama3_json"),
    (r"Action Input:", "react"),
)
REASONING_MARKS = (
    (r"<\|channel\|>.*<\|message\|>|<\|message\|>.*<\|channel\|>", HARMONY),
    (r"\[THINK\]", "mistral"),
    (r"<seed:think>", "seed_oss"),
    (r"<\|channel>thought", "gemma4"),
    (r"<\|START_THINKING\|>", "cohere"),
    (r"◁think▷", "kimi"),
    (r"<\|inner_prefix\|>", "apertus"),
    (r"Here is my thought process:", "granite"),
    (r"<response></response>", "response"),
    (r"</?think>", "think"),
)
# Models whose prompts are not written by a template that shows it.
BY_MODEL_TYPE: dict[str, tuple[str | None, str | None]] = {
    "gpt_oss": (HARMONY, HARMONY),
    "deepseek_v3": ("deepseek_v3", "think"),
    "deepseek_v32": ("deepseek_dsml", "think"),
    "deepseek_v4": ("deepseek_dsml", "think"),
    "kimi_k2": ("kimi_k2", "think"),
    "glm4_moe": ("glm45", "think"),
    "minimax_m2": ("minimax_m2", "think"),
    "seed_oss": ("seed_oss", "seed_oss"),
}
