// What the engine does, as it happens. A stand-in until the server has the feed: it reports that there is none.
//   connect({apiKey, onState, onStatus}) -> {close()}
//     apiKey: string or null; onState(state) for each frame; onStatus("connecting" | "live" | "lost" | "off", words)
export function connect({ onStatus }) {
  onStatus("off", "this server sends no events of its engine");
  return { close() {} };
}
