"""OpenAI's files and batches over the durable queue: uploads, checks of lines, running them, their results."""
