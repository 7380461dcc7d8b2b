"""What OpenAI's API says, in terms of jobs: pure, without a server, a broker or a model.

Conversations with tools become prompts (``conversation``), forced calls become constraints
(``forced_calls``), and what a model writes becomes content, reasoning and tool calls
(``output_parser``).
"""
