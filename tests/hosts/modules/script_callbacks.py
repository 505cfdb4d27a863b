_ui_tabs = []
_app_started = []


def on_ui_tabs(callback):
    _ui_tabs.append(callback)


def on_app_started(callback):
    _app_started.append(callback)


def app_started_callback(demo, app):
    for callback in _app_started:
        callback(demo, app)


def clear_callbacks():
    _ui_tabs.clear()
    _app_started.clear()


def ui_tabs_callback():
    return [tab for callback in _ui_tabs for tab in callback() or []]
