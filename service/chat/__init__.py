"""Conversations in any protocol: the prompt that a template makes, and the parts that a reply falls into.

A dialect turns its body into a `Conversation` (`conversation.py`). Rendered, it becomes a prompt and a `ReplyFormat`
(`formats.py`): how this model marks its reasoning and its tool calls. `reply_parser.py` parts the text of a reply by
it, while it streams, into the parts of `parts.py`; dialects only render these. `call_grammar.py` writes the grammar
that holds calls to their schemas. Nothing here knows a protocol.
"""
