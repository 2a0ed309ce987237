"""Conversations in any protocol: the prompt that a template makes, and the parts that a reply falls into.

A dialect turns its body into a `Conversation` (`conversation.py`), whose messages get the form that the model's chat
template takes (`message_fit.py`). Rendered, it becomes a prompt and a `ReplyFormat`: how this model marks its reasoning
and its tool calls. `template_probe.py` finds that when a model is loaded, among `formats.py` or in what the template
renders (`derived_syntax.py`). `reply_parser.py` parts the text of a reply by
it, while it streams, into the parts of `parts.py`; dialects only render these. `call_grammar.py` writes the grammar
that holds calls to their schemas. Nothing here knows a protocol.
"""
