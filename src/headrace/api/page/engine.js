// The engine's side of the page. A stand-in until there is a feed.
//   mount(element, feed); showRequest(id): the id of an answer (the engine's own ids begin with it)
export function mount(element) {
  element.textContent = "";
}

export function showRequest() {}
