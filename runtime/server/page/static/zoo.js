// The zoo's page: one module. Each part starts where its element is; the views of the store work without it.

/** Shows the server's state as it changes. The events are HTML that the server has escaped. */
function watch(target, note) {
  const source = new EventSource(target.dataset.events);
  source.onopen = () => { note.textContent = "live"; };
  source.onmessage = (event) => { target.innerHTML = event.data; };
  source.onerror = () => {
    note.textContent = source.readyState === EventSource.CLOSED ? "not live any more: load the page again" : "the server does not answer; trying again";
  };
}

const live = document.getElementById("live");
if (live) watch(live, document.getElementById("live-note"));
