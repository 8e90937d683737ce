"""A small shop whose periodic work runs on celery_dtimer."""
