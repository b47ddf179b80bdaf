// A guided scene as it is shown: its steps one after the other, each begun by the reader.

import { Component, html } from "./vendor/htm-preact.js";
import { IconButton } from "./icons.js";
import { SCENES } from "./scenes.js";
import { Stage } from "./stage.js";

export function SceneList({ pick }) {
  return html`<section class="scene-list" aria-label="Guided scenes">
    <h3>Or let it be shown to you</h3>
    <ol>
      ${SCENES.map(
        (scene) => html`<li><button onClick=${() => pick(scene)}><span>${scene.title}</span><span class="quiet">${scene.promise}</span></button></li>`,
      )}
    </ol>
  </section>`;
}

/** Props: scene, model, show, close, pick. */
export class Scene extends Component {
  state = { done: [], running: false, error: null };
  memory = {};

  constructor(props) {
    super(props);
    this.stage = new Stage(props.model);
  }

  componentWillUnmount() {
    this.stage.leave();
  }

  /** The next step: what it measured is kept, what went wrong can be tried again. */
  next = async () => {
    const step = this.props.scene.steps[this.state.done.length];
    this.setState({ running: true, error: null });
    try {
      await this.stage.look();
      const outcome = await step.run(this.stage, this.memory);
      this.setState(({ done }) => ({ done: [...done, outcome], running: false }));
    } catch (error) {
      if (error.name !== "AbortError") this.setState({ running: false, error: error.message });
    }
  };

  render({ scene, show, close, pick }, { done, running, error }) {
    const over = done.length === scene.steps.length || done.at(-1)?.stops;
    const following = SCENES[SCENES.indexOf(scene) + 1];
    return html`<section class="scene" aria-label=${`Scene: ${scene.title}`}>
      <header><h2>${scene.title}</h2><${IconButton} name="close" label="Leave the scene" onClick=${close} /></header>
      <p class="quiet">${scene.promise}</p>
      <ol class="steps">
        ${scene.steps.slice(0, over ? done.length : done.length + 1).map(
          (step, i) => html`<li key=${i}><h3>${step.title}</h3><p>${step.text}</p>${done[i] && html`<${Outcome} outcome=${done[i]} show=${show} />`}</li>`,
        )}
      </ol>
      ${error && html`<p class="notice" role="alert">${error}</p>`}
      <p class="row">
        ${!over && html`<button class="primary" disabled=${running} onClick=${this.next}>${running ? "Running" : error ? "Try it again" : done.length ? "Go on" : "Begin"}</button>`}
        ${over && following && html`<button class="primary" onClick=${() => pick(following)}>Next scene: ${following.title}</button>`}
        ${over && html`<button onClick=${close}>Back to the chat</button>`}
        ${over && html`<a href=${`page/tour.html#${scene.tour}`} target="_blank">how it is done, in the tour of the code</a>`}
      </p>
      <p class="hidden-words" role="status">${running ? "The step runs." : done.length ? `Step ${done.length} is done.` : ""}</p>
    </section>`;
  }
}

function Outcome({ outcome, show }) {
  const { facts = [], words, command, result } = outcome;
  return html`<div class="outcome">
    ${facts.length > 0 && html`<dl>${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`}
    ${words && html`<p>${words}</p>`}
    ${command && html`<pre tabindex="0"><code>${command}</code></pre>`}
    ${result?.id && html`<button class="link" onClick=${() => show(result.id)}>show me this request in the engine</button>`}
  </div>`;
}
