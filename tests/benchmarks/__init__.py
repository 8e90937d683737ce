"""The benchmark: celery_dtimer measured beside Celery beat and celery-redbeat, in one run."""
