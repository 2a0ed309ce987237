"""Conversations of all protocols: chat templates, prompts, and parsed replies.

A dialect turns its request body into a `Conversation` (`conversation.py`). `message_fit.py` gives its messages the form
that the model's chat template takes. Rendering gives the prompt and a `ReplyFormat`: how this model marks its reasoning
and its tool calls. `template_probe.py` finds the format when a model is loaded: a row of `formats.py`, or a syntax that
`derived_syntax.py` reads from rendered text. `reply_parser.py` splits a streamed reply into the parts of `parts.py`,
which dialects render. `call_grammar.py` writes the grammar that makes calls match their schemas. No module here depends
on a protocol.
"""
